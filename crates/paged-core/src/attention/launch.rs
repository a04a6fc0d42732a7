//! Arguments of an attention launch and their checks.

use super::append::NewTokens;
use super::array::Array;
use super::element::{ElementType, load_any};
use super::heads::Heads;
use super::pages::{Pages, PoolLayout};
use super::params::{AttentionParams, Softmax};
use super::simd::Simd;
use crate::error::{Error, Result};

/// Most query heads that share a KV head.
pub(crate) const MAX_GROUP: usize = 16;

/// Arrays and options of a launch. A query row is a sequence of the batch in decode, a token of the one sequence in prefill.
#[derive(Debug)]
pub struct AttentionArguments<'a> {
    /// Queries `[num_rows, num_qo_heads, head_dim]`.
    pub q: Array<'a, 3>,
    /// Output, shape and element type of `q`.
    pub out: Array<'a, 3>,
    /// Base-2 log-sum-exp of the scaled logits, f32 `[num_rows, num_qo_heads]`.
    pub lse: Option<Array<'a, 2>>,
    /// Keys, in `layout`.
    pub k_pages: Array<'a, 4>,
    /// Values, shape and element type of `k_pages`.
    pub v_pages: Array<'a, 4>,
    /// Keys and values of the query rows' own tokens, written to their pages first.
    pub new: Option<NewTokens<'a>>,
    /// Layout of the pools.
    pub layout: PoolLayout,
    /// Scale, soft cap, sinks, window.
    pub params: AttentionParams<'a>,
}

/// A checked launch.
pub(crate) struct Launch {
    pub q: Heads,
    pub out: Heads,
    pub lse: Option<Heads>,
    pub k: Pages,
    pub v: Pages,
    pub head_dim: usize,
    pub num_qo_heads: usize,
    /// Query heads per KV head.
    pub group_size: usize,
    pub softmax: Softmax,
}

impl Launch {
    /// Checks everything but the pages of the rows.
    ///
    /// # Errors
    /// `InvalidArgument` or `InvalidType` naming the argument.
    pub fn new(arguments: &AttentionArguments<'_>, num_rows: usize) -> Result<Self> {
        let AttentionArguments { q, out, lse, k_pages, v_pages, new, layout, params } = arguments;
        let (k, v) = Pages::pair(k_pages, v_pages, *layout)?;
        let [_, num_qo_heads, head_dim] = q.shape();
        q.expect_shape([num_rows, num_qo_heads, k.head_dim], "[num_rows, num_qo_heads, head_dim]")?;
        if num_qo_heads % k.num_kv_heads != 0 || !(1..=MAX_GROUP).contains(&(num_qo_heads / k.num_kv_heads)) {
            return Err(q.invalid(format!(
                "{num_qo_heads} query heads over {} KV heads, expected 1 to {MAX_GROUP} per KV head",
                k.num_kv_heads
            )));
        }
        q.expect_contiguous_rows()?;
        out.expect_shape(q.shape(), "the shape of q")?;
        out.expect_element(q.element_type(), "the element type of q")?;
        out.expect_contiguous_rows()?;
        let softmax = params.resolve(num_qo_heads)?;
        if let Some(lse) = lse {
            lse.expect_shape([num_rows, num_qo_heads], "[num_rows, num_qo_heads]")?;
            lse.expect_element(ElementType::F32, "base-2 log-sum-exp in full precision")?;
            expect_output(lse, arguments)?;
            lse.expect_apart(out)?;
        }
        expect_output(out, arguments)?;
        if new.is_some() {
            for pages in [k_pages, v_pages] {
                pages.expect_apart(q)?;
                if let Some(sinks) = &params.sinks {
                    pages.expect_apart(sinks)?;
                }
            }
        }
        Ok(Self {
            q: Heads::new(q),
            out: Heads::new(out),
            lse: lse.as_ref().map(Heads::new),
            k,
            v,
            head_dim,
            num_qo_heads,
            group_size: num_qo_heads / k.num_kv_heads,
            softmax,
        })
    }
}

impl Launch {
    /// A query as f32, scaled for the softmax.
    ///
    /// # Safety
    /// `row` and `head` are inside q, and `query` has `head_dim` values.
    #[inline(always)]
    pub unsafe fn load_query<S: Simd>(&self, s: S, row: usize, head: usize, query: &mut [f32]) {
        let scale = s.splat(self.softmax.q_scale);
        let size = self.q.element.size_bytes();
        let mut i = 0;
        while i < query.len() {
            // SAFETY: the caller's promise; head_dim is a multiple of the lanes.
            unsafe {
                let x = load_any(s, self.q.element, self.q.at(row, head).add(i * size));
                s.store_f32(query.as_mut_ptr().add(i), s.mul(x, scale));
            }
            i += S::LANES;
        }
    }
}

fn expect_output<const N: usize>(
    output: &Array<'_, N>,
    arguments: &AttentionArguments<'_>,
) -> Result<(), Error> {
    output.expect_writable()?;
    output.expect_apart(&arguments.q)?;
    output.expect_apart(&arguments.k_pages)?;
    output.expect_apart(&arguments.v_pages)?;
    if let Some(new) = &arguments.new {
        output.expect_apart(&new.k)?;
        output.expect_apart(&new.v)?;
    }
    if let Some(sinks) = &arguments.params.sinks {
        output.expect_apart(sinks)?;
    }
    Ok(())
}
