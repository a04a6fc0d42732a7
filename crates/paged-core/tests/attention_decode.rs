//! Decode against the f64 oracle: the odd grid, windows, sinks, soft caps, splits, extreme values.

mod oracle;

use half::{bf16, f16};
use oracle::{Case, Rng, Shape, TestElement, assert_close, executors};
use paged_core::attention::{ElementType, PoolLayout};

const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
const PAGE_SIZES: [usize; 8] = [8, 16, 32, 64, 128, 1, 5, 20];
const POISONS: [f32; 3] = [f32::NAN, f32::INFINITY, 65504.0];
const ELEMENTS: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

/// Levels of the factors: head dim, group, page size, element, layout, poison, window, options, splits.
const LEVELS: [usize; 9] = [5, 16, 8, 3, 2, 3, 3, 4, 4];

/// All head dims x groups; the other factors so that every pair of levels of any two factors occurs.
fn pairwise_cover() -> Vec<[usize; 9]> {
    let pairs = |row: &[usize; 9]| {
        let row = *row;
        (0..9).flat_map(move |a| (0..a).map(move |b| (a, row[a], b, row[b])))
    };
    let mut covered = std::collections::HashSet::new();
    let mut rng = Rng::new(1);
    let mut rows = Vec::new();
    for product in 0.. {
        let total: usize = (0..9).map(|a| (0..a).map(|b| LEVELS[a] * LEVELS[b]).sum::<usize>()).sum();
        if product >= LEVELS[0] * LEVELS[1] && covered.len() == total {
            break;
        }
        let candidate = |rng: &mut Rng| {
            let mut row = LEVELS.map(|n| rng.below(n));
            if product < LEVELS[0] * LEVELS[1] {
                (row[0], row[1]) = (product % LEVELS[0], product / LEVELS[0]);
            }
            row
        };
        let best = (0..60)
            .map(|_| candidate(&mut rng))
            .max_by_key(|row| pairs(row).filter(|pair| !covered.contains(pair)).count())
            .expect("60 candidates");
        covered.extend(pairs(&best));
        rows.push(best);
    }
    rows
}

fn shape_of(row: &[usize; 9], rng: &mut Rng) -> Shape {
    let page = PAGE_SIZES[row[2]];
    let lengths = [0, 1, page - 1, page, page + 1, 2 * page + 3, 0, 77];
    let mut shape = Shape::new(page, HEAD_DIMS[row[0]], 1 + rng.below(2), row[1] + 1, &lengths);
    shape.layout = [PoolLayout::Nhd, PoolLayout::Hnd][row[4]];
    shape.poison = POISONS[row[5]];
    shape.window = [None, Some(page + 1), Some(3 * page)][row[6]];
    shape.soft_cap = if row[7] & 1 != 0 { 1.5 } else { 0.0 };
    shape.sinks = row[7] & 2 != 0;
    for (length, offset) in &mut shape.rows {
        *offset = if *length > 0 { rng.below(page) } else { 0 };
    }
    shape
}

fn check<T: TestElement>(shape: Shape, num_splits: usize, seed: u64) {
    let case = Case::<T>::random(shape, seed);
    let expected = case.oracle_decode();
    for executor in executors() {
        let found = case.decode(&executor, num_splits);
        assert_close(&case, &found, &expected, executor.simd().name());
    }
}

#[test]
fn agrees_with_the_oracle_on_a_pairwise_cover_of_the_grid() {
    let mut rng = Rng::new(2);
    for (seed, row) in pairwise_cover().iter().enumerate() {
        let shape = shape_of(row, &mut rng);
        let num_splits = [1, 2, 3, 7][row[8]];
        match ELEMENTS[row[3]] {
            ElementType::F32 => check::<f32>(shape, num_splits, seed as u64),
            ElementType::F16 => check::<f16>(shape, num_splits, seed as u64),
            ElementType::Bf16 => check::<bf16>(shape, num_splits, seed as u64),
        }
    }
}

#[test]
fn a_window_shows_exactly_its_tokens() {
    // V of token t is 1 at element t: with K = 0 the output says which tokens were seen.
    for page in [8, 16] {
        let len = 3 * page + 5;
        for window in [1, 2, page - 1, page, page + 1, len - 1, len, len + 1] {
            for num_splits in [1, 3] {
                let mut shape = Shape::new(page, 80, 1, 3, &[len]);
                shape.window = Some(window);
                let mut case = Case::<f32>::random(shape, 3);
                for token in case.first_kept(0)..len {
                    let at = case.element(0, token, 0);
                    case.k[at..at + 80].fill(0.0);
                    case.v[at..at + 80].fill(0.0);
                    case.v[at + token] = 1.0;
                }
                for executor in executors() {
                    let found = case.decode(&executor, num_splits);
                    let num_visible = window.min(len);
                    for (token, weight) in found.out.chunks(80).flat_map(|row| row.iter().enumerate()) {
                        let expected = if token < len && token >= len - num_visible {
                            1.0 / num_visible as f64
                        } else {
                            0.0
                        };
                        assert!(
                            (weight - expected).abs() < 1e-7,
                            "window {window} of {len}: token {token} has {weight}"
                        );
                    }
                    assert!(found.lse.iter().all(|lse| (lse - (num_visible as f64).log2()).abs() < 1e-6));
                }
            }
        }
    }
}

#[test]
fn equal_logits_give_exact_means_and_lse() {
    for len in 1..=70 {
        let mut case = Case::<f16>::random(Shape::new(16, 64, 1, 4, &[len]), len as u64);
        for token in 0..len {
            let at = case.element(0, token, 0);
            case.k[at..at + 64].fill(f16::ZERO);
            case.v[at..at + 64].fill(f16::ONE);
        }
        for executor in executors() {
            let found = case.decode(&executor, 1 + len % 3);
            assert!(found.out.iter().all(|x| *x == 1.0), "{len} tokens: {:?}", found.out[0]);
            let lse = f64::from((len as f64).log2() as f32);
            assert!(found.lse.iter().all(|x| *x == lse), "{len} tokens: {} instead of {lse}", found.lse[0]);
        }
    }
}

#[test]
fn a_sink_counts_once_however_the_row_is_split() {
    let mut shape = Shape::new(8, 64, 2, 5, &[0, 1, 40, 100]);
    shape.sinks = true;
    let mut case = Case::<f32>::random(shape, 5);
    // As strong as the strongest logit, and far stronger.
    for (head, sink) in case.sinks.iter_mut().enumerate() {
        *sink = if head % 2 == 0 { 3.0 } else { 50.0 };
    }
    let expected = case.oracle_decode();
    for executor in executors() {
        for num_splits in [1, 2, 7, 40] {
            let found = case.decode(&executor, num_splits);
            assert_close(&case, &found, &expected, &format!("{num_splits} splits"));
            for head in 0..10 {
                assert!(found.out[head * 64..][..64].iter().all(|x| *x == 0.0), "a row without tokens");
                let lse = f64::from(case.sinks[head]) * std::f64::consts::LOG2_E;
                assert!((found.lse[head] - lse).abs() <= 1e-5 + 4e-7 * lse.abs());
            }
        }
    }
}

#[test]
fn soft_caps_bound_small_and_huge_logits() {
    for (cap, factor) in [(1.0, 0.01), (1.0, 1e4), (30.0, 1.0), (50.0, 300.0), (50.0, 3e4), (1e4, 1.0)] {
        let mut shape = Shape::new(16, 128, 1, 4, &[1, 33, 150]);
        shape.soft_cap = cap;
        shape.sm_scale *= factor;
        let mut case = Case::<f32>::random(shape, 6);
        // One element of q decides, so that a logit is as exact as its product.
        for query in case.q.chunks_mut(128) {
            query[1..].fill(0.0);
        }
        let expected = case.oracle_decode();
        for executor in executors() {
            for num_splits in [1, 4] {
                assert_close(
                    &case,
                    &case.decode(&executor, num_splits),
                    &expected,
                    &format!("cap {cap} x {factor}"),
                );
            }
        }
    }
}

#[test]
fn extreme_logits_neither_overflow_nor_vanish() {
    for sm_scale in [0.0, 1e-30, 1e3, -1e3] {
        let mut shape = Shape::new(16, 64, 1, 2, &[64]);
        shape.sm_scale = sm_scale;
        let case = Case::<bf16>::random(shape, 7);
        let expected = case.oracle_decode();
        for executor in executors() {
            let found = case.decode(&executor, 3);
            for (found, expected) in found.out.iter().zip(&expected.out) {
                // Logits of 1e4 carry an f32 rounding error of 1e-3.
                assert!((found - expected).abs() < 2e-2, "scale {sm_scale}: {found}, expected {expected}");
            }
            for (found, expected) in found.lse.iter().zip(&expected.lse) {
                assert!(
                    (found - expected).abs() <= 1e-5 + 1e-6 * expected.abs(),
                    "scale {sm_scale}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn keys_of_minus_infinity_are_never_chosen() {
    let mut case = Case::<f32>::random(Shape::new(8, 64, 1, 2, &[20, 5]), 8);
    case.q.fill(1.0);
    for token in 0..5 {
        let at = case.element(1, token, 0);
        case.k[at..at + 64].fill(f32::NEG_INFINITY);
    }
    for token in [0, 7, 19] {
        let at = case.element(0, token, 0);
        case.k[at..at + 64].fill(f32::NEG_INFINITY);
    }
    for executor in executors() {
        for num_splits in [1, 5] {
            let found = case.decode(&executor, num_splits);
            assert!(found.out.iter().all(|x| x.is_finite()));
            assert!(found.out[128..].iter().all(|x| *x == 0.0), "nothing to choose from");
            assert!(found.lse[2..].iter().all(|x| *x == f64::NEG_INFINITY));
        }
    }
}

#[test]
fn repeats_are_bit_identical_and_neighbours_do_not_matter() {
    let lengths = [700, 3, 0, 64, 1500, 129];
    let case = Case::<f16>::random(Shape::new(16, 128, 2, 4, &lengths), 9);
    for executor in executors() {
        let first = case.decode(&executor, 3);
        for _ in 0..100 {
            let again = case.decode(&executor, 3);
            assert_eq!(first.out, again.out);
            assert_eq!(first.lse, again.lse);
        }
        // Row 3 alone: the same cache, the other rows gone.
        let mut alone = Case::<f16>::random(Shape::new(16, 128, 2, 4, &lengths), 9);
        alone.q = alone.q[3 * 8 * 128..4 * 8 * 128].to_vec();
        alone.page_ids = vec![alone.page_ids[3].clone()];
        alone.shape.rows = vec![(64, 0)];
        assert_eq!(first.out[3 * 8 * 128..4 * 8 * 128], alone.decode(&executor, 3).out);
    }
}

#[test]
fn heads_keep_apart() {
    // Each KV head has a value of its own, so a swap of heads shows.
    for group in 1..=16 {
        let mut case = Case::<f32>::random(Shape::new(8, 96, 3, group, &[21]), 10);
        for token in 0..21 {
            for head in 0..3 {
                let at = case.element(0, token, head);
                case.v[at..at + 96].fill(head as f32 + 1.0);
            }
        }
        for executor in executors() {
            for (head, row) in case.decode(&executor, 2).out.chunks(96).enumerate() {
                let expected = (head / group) as f64 + 1.0;
                assert!(row.iter().all(|x| (x - expected).abs() < 1e-6), "group {group}, head {head}");
            }
        }
    }
}
