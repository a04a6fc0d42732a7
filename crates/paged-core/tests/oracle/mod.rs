//! Test support: paged caches with poison around every visible token, and attention in f64 that indexes pages itself.
#![allow(dead_code, reason = "each test binary uses a part")]

use half::{bf16, f16};
use paged_core::Result;
use paged_core::attention::{
    Array, AttentionArguments, AttentionParams, DecodeBatch, Element, ElementType, Executor, NewTokens,
    PagedSequence, PoolLayout, WorkItem, decode, prefill,
};

/// Deterministic numbers (xorshift64*).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize) % n
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

pub trait TestElement: Element {
    fn from_f32(x: f32) -> Self;
    fn to_f64(self) -> f64;
}

impl TestElement for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl TestElement for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl TestElement for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

/// Shape and options of a test case.
#[derive(Clone, Debug)]
pub struct Shape {
    pub layout: PoolLayout,
    pub page_size: usize,
    pub head_dim: usize,
    pub num_kv_heads: usize,
    pub group_size: usize,
    /// Tokens per row, and the entry of the first page where they start.
    pub rows: Vec<(usize, usize)>,
    pub window: Option<usize>,
    pub soft_cap: f32,
    pub sinks: bool,
    pub sm_scale: f32,
    /// Fills what no token owns.
    pub poison: f32,
}

impl Shape {
    pub fn new(
        page_size: usize,
        head_dim: usize,
        num_kv_heads: usize,
        group_size: usize,
        lengths: &[usize],
    ) -> Self {
        Self {
            layout: PoolLayout::Hnd,
            page_size,
            head_dim,
            num_kv_heads,
            group_size,
            rows: lengths.iter().map(|len| (*len, 0)).collect(),
            window: None,
            soft_cap: 0.0,
            sinks: false,
            sm_scale: (head_dim as f32).powf(-0.5),
            poison: f32::NAN,
        }
    }

    pub fn num_qo_heads(&self) -> usize {
        self.num_kv_heads * self.group_size
    }
}

/// Query, caches and options, filled.
pub struct Case<T> {
    pub shape: Shape,
    pub num_pages: usize,
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub page_ids: Vec<Vec<i32>>,
    pub sinks: Vec<f32>,
}

pub struct Output {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

impl<T: TestElement> Case<T> {
    /// Random values in -1..1, pages in random order, a few pages that nobody owns.
    pub fn random(shape: Shape, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let pages_of = |(len, offset): (usize, usize)| {
            if len == 0 { 0 } else { (len + offset).div_ceil(shape.page_size) }
        };
        let num_pages = shape.rows.iter().map(|row| pages_of(*row)).sum::<usize>() + 3;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        rng.shuffle(&mut ids);
        let page_ids: Vec<Vec<i32>> =
            shape.rows.iter().map(|row| ids.split_off(ids.len() - pages_of(*row))).collect();
        let num_elements = num_pages * shape.page_size * shape.num_kv_heads * shape.head_dim;
        let q = (0..shape.rows.len() * shape.num_qo_heads() * shape.head_dim)
            .map(|_| T::from_f32(rng.value()))
            .collect();
        let poisoned = vec![T::from_f32(shape.poison); num_elements];
        let sinks = (0..shape.num_qo_heads()).map(|_| 2.0 * rng.value()).collect();
        let mut case = Self { num_pages, q, k: poisoned.clone(), v: poisoned, page_ids, sinks, shape };
        for row in 0..case.shape.rows.len() {
            for token in case.first_kept(row)..case.shape.rows[row].0 {
                for head in 0..case.shape.num_kv_heads {
                    let at = case.element(row, token, head);
                    for i in 0..case.shape.head_dim {
                        case.k[at + i] = T::from_f32(rng.value());
                        case.v[at + i] = T::from_f32(rng.value());
                    }
                }
            }
        }
        case
    }

    /// Tokens before it are outside the window and stay poison.
    pub fn first_kept(&self, row: usize) -> usize {
        self.shape.window.map_or(0, |window| self.shape.rows[row].0.saturating_sub(window))
    }

    pub fn pool_shape(&self) -> [usize; 4] {
        let Shape { page_size, num_kv_heads, head_dim, .. } = self.shape;
        match self.shape.layout {
            PoolLayout::Nhd => [self.num_pages, page_size, num_kv_heads, head_dim],
            PoolLayout::Hnd => [self.num_pages, num_kv_heads, page_size, head_dim],
        }
    }

    /// Index of a token's first element in the pools.
    pub fn element(&self, row: usize, token: usize, head: usize) -> usize {
        let Shape { page_size, num_kv_heads, head_dim, .. } = self.shape;
        let at = self.shape.rows[row].1 + token;
        let (page, entry) = (self.page_ids[row][at / page_size] as usize, at % page_size);
        match self.shape.layout {
            PoolLayout::Nhd => ((page * page_size + entry) * num_kv_heads + head) * head_dim,
            PoolLayout::Hnd => ((page * num_kv_heads + head) * page_size + entry) * head_dim,
        }
    }

    pub fn sequence(&self, row: usize) -> PagedSequence<'_> {
        let (num_tokens, first_page_offset) = self.shape.rows[row];
        PagedSequence { page_ids: &self.page_ids[row], first_page_offset, num_tokens }
    }

    /// Each row's tokens in `num_splits` items of about equal size, rows interleaved as they come.
    pub fn batch(&self, num_splits: usize) -> DecodeBatch<'_> {
        let mut batch = DecodeBatch::default();
        for row in 0..self.shape.rows.len() {
            batch.rows.push(self.sequence(row));
            let len = self.shape.rows[row].0;
            for split in 0..num_splits {
                let (begin, end) = (len * split / num_splits, len * (split + 1) / num_splits);
                let end = if split + 1 == num_splits { usize::MAX } else { end };
                batch.items.push(WorkItem { row, begin, end });
            }
        }
        batch
    }

    pub fn params(&self) -> AttentionParams<'_> {
        AttentionParams {
            sm_scale: self.shape.sm_scale,
            logits_soft_cap: self.shape.soft_cap,
            sinks: self
                .shape
                .sinks
                .then(|| Array::from_slice("sinks", &self.sinks, [self.sinks.len()], None).expect("sinks")),
            window: self.shape.window,
        }
    }

    pub fn decode(&self, executor: &Executor, num_splits: usize) -> Output {
        let batch = self.batch(num_splits);
        self.launch(self.shape.rows.len(), &self.q, |arguments| decode(executor, arguments, &batch))
    }

    /// The last `q.len() / row` tokens of row 0 as one multi-token launch.
    pub fn prefill(&self, executor: &Executor, q: &[T]) -> Output {
        let num_queries = q.len() / (self.shape.num_qo_heads() * self.shape.head_dim);
        self.launch(num_queries, q, |arguments| prefill(executor, arguments, self.sequence(0)))
    }

    fn launch(
        &self,
        num_rows: usize,
        q: &[T],
        run: impl FnOnce(&AttentionArguments<'_>) -> Result<()>,
    ) -> Output {
        let heads = self.shape.num_qo_heads();
        let shape = [num_rows, heads, self.shape.head_dim];
        // Rows are spread out, so that a write beyond a row is seen.
        let guard = T::from_f32(7.0);
        let stride = heads * self.shape.head_dim + 16;
        let mut out = vec![guard; (num_rows * stride).max(1)];
        let mut lse = vec![f32::NAN; num_rows * heads];
        let strides = Some([stride as isize, self.shape.head_dim as isize, 1]);
        run(&AttentionArguments {
            q: Array::from_slice("q", q, shape, None).expect("q"),
            out: Array::from_slice_mut("out", &mut out, shape, strides).expect("out"),
            lse: Some(Array::from_slice_mut("lse", &mut lse, [num_rows, heads], None).expect("lse")),
            k_pages: Array::from_slice("k_pages", &self.k, self.pool_shape(), None).expect("k_pages"),
            v_pages: Array::from_slice("v_pages", &self.v, self.pool_shape(), None).expect("v_pages"),
            new: None,
            layout: self.shape.layout,
            params: self.params(),
        })
        .expect("launch");
        let mut rows = Vec::with_capacity(num_rows * (stride - 16));
        for row in out.chunks_exact(stride) {
            let (row, after) = row.split_at(stride - 16);
            assert!(after.iter().all(|x| x.to_f64() == 7.0), "wrote beyond a row");
            rows.extend(row.iter().map(|x| x.to_f64()));
        }
        Output { out: rows, lse: lse.into_iter().map(f64::from).collect() }
    }

    /// One query of `row` that sits at token `position` and sees what it may, in f64.
    pub fn oracle_query(&self, row: usize, position: usize, q: &[T], qo_head: usize) -> (Vec<f64>, f64) {
        let dim = self.shape.head_dim;
        let kv_head = qo_head / self.shape.group_size;
        let first = self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut logits: Vec<f64> = Vec::new();
        for token in first..=position {
            let at = self.element(row, token, kv_head);
            let dot: f64 = (0..dim).map(|i| q[i].to_f64() * self.k[at + i].to_f64()).sum();
            let mut logit = dot * f64::from(self.shape.sm_scale);
            if self.shape.soft_cap > 0.0 {
                let cap = f64::from(self.shape.soft_cap);
                logit = cap * (logit / cap).tanh();
            }
            logits.push(logit);
        }
        self.oracle_combine(&logits, qo_head, |i| self.element(row, first + i, kv_head))
    }

    fn oracle_combine(
        &self,
        logits: &[f64],
        qo_head: usize,
        element: impl Fn(usize) -> usize,
    ) -> (Vec<f64>, f64) {
        let sink = self.shape.sinks.then(|| f64::from(self.sinks[qo_head]));
        let max = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; self.shape.head_dim];
        if max == f64::NEG_INFINITY {
            return (out, max);
        }
        let sum: f64 = logits.iter().copied().chain(sink).map(|x| (x - max).exp()).sum();
        for (i, logit) in logits.iter().enumerate() {
            let weight = (logit - max).exp() / sum;
            for (to, v) in out.iter_mut().zip(&self.v[element(i)..]) {
                *to += weight * v.to_f64();
            }
        }
        (out, (max + sum.ln()) / std::f64::consts::LN_2)
    }

    pub fn oracle_decode(&self) -> Output {
        let (heads, dim) = (self.shape.num_qo_heads(), self.shape.head_dim);
        let mut output = Output { out: Vec::new(), lse: Vec::new() };
        for row in 0..self.shape.rows.len() {
            for head in 0..heads {
                let q = &self.q[(row * heads + head) * dim..][..dim];
                let (out, lse) = match self.shape.rows[row].0.checked_sub(1) {
                    Some(position) => self.oracle_query(row, position, q, head),
                    None => self.oracle_combine(&[], head, |_| 0),
                };
                output.out.extend(out);
                output.lse.push(lse);
            }
        }
        output
    }

    pub fn oracle_prefill(&self, q: &[T]) -> Output {
        let (heads, dim) = (self.shape.num_qo_heads(), self.shape.head_dim);
        let num_queries = q.len() / (heads * dim);
        let mut output = Output { out: Vec::new(), lse: Vec::new() };
        for (i, q) in q.chunks_exact(dim).enumerate() {
            let position = self.shape.rows[0].0 - num_queries + i / heads;
            let (out, lse) = self.oracle_query(0, position, q, i % heads);
            output.out.extend(out);
            output.lse.push(lse);
        }
        output
    }
}

/// Largest relative error of an output element, against the largest of its row.
pub fn tolerance(element: ElementType) -> f64 {
    match element {
        ElementType::F32 => 2e-5,
        ElementType::F16 => 1.5e-3,
        ElementType::Bf16 => 1.5 / 256.0,
    }
}

/// Checks an output against the oracle's.
pub fn assert_close<T: TestElement>(case: &Case<T>, found: &Output, expected: &Output, context: &str) {
    let dim = case.shape.head_dim;
    let limit = tolerance(T::TYPE);
    for (row, (found, expected)) in found.out.chunks(dim).zip(expected.out.chunks(dim)).enumerate() {
        let scale = expected.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (found - expected).abs();
            assert!(
                error <= limit * scale,
                "{context}: head row {row} element {i}: {found}, expected {expected}\n{:?}",
                case.shape
            );
        }
    }
    assert_eq!(found.lse.len(), expected.lse.len());
    for (row, (found, expected)) in found.lse.iter().zip(&expected.lse).enumerate() {
        let close = found == expected || (found - expected).abs() <= 1e-5 + 4e-7 * expected.abs();
        assert!(close, "{context}: LSE of head row {row}: {found}, expected {expected}\n{:?}", case.shape);
    }
}

/// Every level of this processor, two threads each.
pub fn executors() -> Vec<Executor> {
    use paged_core::attention::SimdLevel;
    SimdLevel::ALL
        .into_iter()
        .filter(|level| level.is_available())
        .map(|level| Executor::new(level, 2).expect("executor"))
        .collect()
}

/// New tokens over slices, `[num_tokens, num_kv_heads, head_dim]`.
pub fn new_tokens<'a, T: TestElement>(k: &'a [T], v: &'a [T], shape: [usize; 3]) -> NewTokens<'a> {
    NewTokens {
        k: Array::from_slice("k_new", k, shape, None).expect("k_new"),
        v: Array::from_slice("v_new", v, shape, None).expect("v_new"),
    }
}
