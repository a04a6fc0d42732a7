//! Causal multi-token attention: against the f64 oracle, and against decode token by token.

mod oracle;

use half::{bf16, f16};
use oracle::{Case, Rng, Shape, TestElement, assert_close, executors, tolerance};
use paged_core::attention::PoolLayout;

fn queries<T: TestElement>(case: &Case<T>, num_queries: usize) -> Vec<T> {
    let mut rng = Rng::new(num_queries as u64);
    (0..num_queries * case.shape.num_qo_heads() * case.shape.head_dim)
        .map(|_| T::from_f32(rng.value()))
        .collect()
}

fn check<T: TestElement>(shape: Shape, num_queries: usize, seed: u64) {
    let mut case = Case::<T>::random(Shape { window: None, ..shape.clone() }, seed);
    // What no query sees is poison, the tokens before the first query's window included.
    let len = shape.rows[0].0;
    let hidden = shape.window.map_or(0, |window| (len + 1).saturating_sub(num_queries + window));
    for token in 0..hidden {
        for head in 0..shape.num_kv_heads {
            let at = case.element(0, token, head);
            case.k[at..at + shape.head_dim].fill(T::from_f32(shape.poison));
            case.v[at..at + shape.head_dim].fill(T::from_f32(shape.poison));
        }
    }
    case.shape = shape;
    let q = queries(&case, num_queries);
    let expected = case.oracle_prefill(&q);
    for executor in executors() {
        assert_close(&case, &case.prefill(&executor, &q), &expected, executor.simd().name());
    }
}

#[test]
fn agrees_with_the_oracle() {
    let mut rng = Rng::new(1);
    let mut seed = 0;
    for head_dim in [64, 80, 96, 128, 256] {
        for group in 1..=16 {
            let page = [8, 16, 20, 64, 128][rng.below(5)];
            let num_queries = [1, 2, 33, 70, 97][rng.below(5)];
            let prefix = [0, 1, page - 1, page, 150][rng.below(5)];
            let mut shape = Shape::new(page, head_dim, 1 + rng.below(2), group, &[prefix + num_queries]);
            shape.rows[0].1 = rng.below(page);
            shape.layout = [PoolLayout::Nhd, PoolLayout::Hnd][rng.below(2)];
            shape.poison = [f32::NAN, f32::INFINITY][rng.below(2)];
            shape.window = [None, Some(1), Some(page + 1), Some(64)][rng.below(4)];
            shape.soft_cap = [0.0, 2.0][rng.below(2)];
            shape.sinks = rng.below(2) == 1;
            seed += 1;
            match rng.below(3) {
                0 => check::<f32>(shape, num_queries, seed),
                1 => check::<f16>(shape, num_queries, seed),
                _ => check::<bf16>(shape, num_queries, seed),
            }
        }
    }
}

#[test]
fn equals_decode_token_by_token() {
    for (window, sinks) in [(None, false), (Some(17), true)] {
        let mut shape = Shape::new(16, 64, 3, 3, &[140]);
        shape.sinks = sinks;
        let mut case = Case::<f32>::random(shape, 2);
        case.shape.window = window;
        let q = queries(&case, 100);
        let row = 9 * 64;
        for executor in executors() {
            let together = case.prefill(&executor, &q);
            for i in 0..100 {
                let mut single = Case::<f32>::random(case.shape.clone(), 2);
                single.k.clone_from(&case.k);
                single.v.clone_from(&case.v);
                single.shape.rows[0].0 = 41 + i;
                single.q = q[i * row..(i + 1) * row].to_vec();
                let alone = single.decode(&executor, 1);
                for (a, b) in alone.out.iter().zip(&together.out[i * row..]) {
                    assert!(
                        (a - b).abs() < tolerance(paged_core::attention::ElementType::F32),
                        "token {i}: {a}, {b}"
                    );
                }
                for (a, b) in alone.lse.iter().zip(&together.lse[i * 9..]) {
                    assert!((a - b).abs() < 1e-5, "token {i}: {a}, {b}");
                }
            }
        }
    }
}

#[test]
fn a_token_without_a_finite_value_spoils_only_the_queries_that_see_it() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::<f32>::random(Shape::new(8, 64, 1, 2, &[90]), 3);
        let q = queries(&case, 90);
        let expected = case.oracle_prefill(&q);
        let at = case.element(0, 45, 0);
        case.v[at..at + 64].fill(bad);
        case.k[at..at + 64].fill(bad);
        for executor in executors() {
            let found = case.prefill(&executor, &q);
            for (i, (found, expected)) in found.out.iter().zip(&expected.out).enumerate() {
                let token = i / 128;
                if token < 45 {
                    assert!((found - expected).abs() < 2e-5, "token {token}: {found}, expected {expected}");
                } else {
                    assert!(!found.is_finite(), "token {token} sees {bad} and gives {found}");
                }
            }
        }
    }
}

#[test]
fn a_window_shows_exactly_its_tokens_to_each_query() {
    let (len, dim) = (75, 80);
    for window in [1, 2, 7, 8, 9, 63, 64, 65, 74, 75, 76] {
        let mut case = Case::<f32>::random(Shape::new(8, dim, 1, 3, &[len]), 4);
        case.shape.window = Some(window);
        for token in 0..len {
            let at = case.element(0, token, 0);
            case.k[at..at + dim].fill(0.0);
            case.v[at..at + dim].fill(0.0);
            case.v[at + token] = 1.0;
        }
        let q = queries(&case, len);
        for executor in executors() {
            for (i, row) in case.prefill(&executor, &q).out.chunks(dim).enumerate() {
                let seen = i / 3 + 1;
                let num_visible = window.min(seen);
                for (token, weight) in row.iter().enumerate() {
                    let is_visible = token < seen && token >= seen - num_visible;
                    let expected = if is_visible { 1.0 / num_visible as f64 } else { 0.0 };
                    assert!(
                        (weight - expected).abs() < 1e-7,
                        "window {window}, query {}: token {token}",
                        seen - 1
                    );
                }
            }
        }
    }
}

#[test]
fn repeats_are_bit_identical() {
    let case = Case::<f16>::random(Shape::new(16, 64, 3, 3, &[300]), 5);
    let q = queries(&case, 200);
    for executor in executors() {
        let first = case.prefill(&executor, &q);
        for _ in 0..30 {
            assert_eq!(first.out, case.prefill(&executor, &q).out);
        }
    }
}
