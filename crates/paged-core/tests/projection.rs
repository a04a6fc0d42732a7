//! Projections of a few rows against f64, and what they promise about bits.

use paged_core::attention::{Executor, SimdLevel};
use paged_core::{MAX_PROJECTION_ROWS, Projection};
use proptest::prelude::*;

/// Matrices with padding between rows; what must not be read is NaN.
struct Case {
    num_columns: usize,
    depth: usize,
    stride: usize,
    a: Vec<f32>,
    w: Vec<f32>,
}

impl Case {
    fn new(num_rows: usize, num_columns: usize, depth: usize, padding: usize, seed: u64) -> Self {
        let stride = depth + padding;
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut fill = |rows: usize| {
            (0..rows * stride)
                .map(|i| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    if i % stride < depth { (state % 2001) as f32 / 1000.0 - 1.0 } else { f32::NAN }
                })
                .collect::<Vec<_>>()
        };
        Self { num_columns, depth, stride, a: fill(num_rows), w: fill(num_columns) }
    }

    /// Rows `begin..end` of C, `[end - begin, num_columns]`, beside guard columns that must stay as they are.
    fn run(&self, executor: &Executor, begin: usize, end: usize, alpha: f32, beta: f32) -> Vec<f32> {
        let stride_c = self.num_columns + 3;
        let mut c = vec![0.5f32; (end - begin) * stride_c];
        let projection = Projection {
            num_rows: end - begin,
            num_columns: self.num_columns,
            depth: self.depth,
            a: (self.a[begin * self.stride..].as_ptr(), self.stride),
            w: (self.w.as_ptr(), self.stride),
            c: (c.as_mut_ptr(), stride_c),
            alpha,
            beta,
        };
        // SAFETY: the vectors hold matrices of these sizes and strides.
        unsafe { projection.run(executor) };
        assert!(c.chunks(stride_c).all(|row| row[self.num_columns..] == [0.5; 3]), "wrote beside C");
        c.chunks(stride_c).flat_map(|row| row[..self.num_columns].to_vec()).collect()
    }

    fn expected(&self, row: usize, column: usize) -> f64 {
        (0..self.depth)
            .map(|k| f64::from(self.a[row * self.stride + k]) * f64::from(self.w[column * self.stride + k]))
            .sum()
    }
}

fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL.into_iter().filter(|level| level.is_available())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn equals_f64_at_every_level_and_thread_count(
        num_rows in 1..=MAX_PROJECTION_ROWS,
        num_columns in 1usize..200,
        depth in 1usize..150,
        padding in 0usize..3,
        beta in prop_oneof![Just(0.0f32), Just(1.0), Just(-0.5)],
        seed in any::<u64>(),
    ) {
        let case = Case::new(num_rows, num_columns, depth, padding, seed);
        for level in levels() {
            for num_threads in [1, 2] {
                let executor = Executor::new(level, num_threads).unwrap();
                let c = case.run(&executor, 0, num_rows, 2.0, beta);
                for row in 0..num_rows {
                    for column in 0..num_columns {
                        let expected = 2.0 * case.expected(row, column) + f64::from(beta) * 0.5;
                        let error = (f64::from(c[row * num_columns + column]) - expected).abs();
                        prop_assert!(error <= 1e-6 * depth as f64, "{level:?} {row} {column}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    // Large enough that several threads take part.
    let case = Case::new(MAX_PROJECTION_ROWS, 1000, 576, 0, 7);
    for level in levels() {
        let executor = Executor::new(level, 2).unwrap();
        let together = case.run(&executor, 0, MAX_PROJECTION_ROWS, 1.0, 0.0);
        for begin in 0..MAX_PROJECTION_ROWS {
            for end in [begin + 1, (begin + 3).min(MAX_PROJECTION_ROWS)] {
                let some = case.run(&executor, begin, end, 1.0, 0.0);
                let same = &together[begin * case.num_columns..end * case.num_columns];
                assert!(
                    some.iter().zip(same).all(|(x, y)| x.to_bits() == y.to_bits()),
                    "{level:?} {begin}..{end}"
                );
            }
        }
    }
}

#[test]
fn old_values_are_not_read_when_beta_is_zero() {
    let case = Case::new(3, 20, 33, 0, 1);
    let executor = Executor::new(SimdLevel::Portable, 1).unwrap();
    let mut c = vec![f32::NAN; 3 * 20];
    let projection = Projection {
        num_rows: 3,
        num_columns: 20,
        depth: 33,
        a: (case.a.as_ptr(), 33),
        w: (case.w.as_ptr(), 33),
        c: (c.as_mut_ptr(), 20),
        alpha: 1.0,
        beta: 0.0,
    };
    // SAFETY: the vectors hold matrices of these sizes.
    unsafe { projection.run(&executor) };
    assert!(c.iter().all(|x| x.is_finite()));
}
