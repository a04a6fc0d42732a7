//! How fast memory can be read: what a decode launch is measured against.

use std::time::Instant;

use super::executor::Executor;
use super::simd::{Kernel, Simd, dispatch};
use crate::error::{Error, Result};

const CHUNK_FLOATS: usize = 256 * 1024;

/// Best of `repeats` plain reads of `num_bytes` bytes by all threads, in 10^9 bytes per second.
///
/// # Errors
/// `InvalidArgument` if `num_bytes` is below 1 MiB or `repeats` is 0, `AllocationFailed`.
pub fn memory_roof(executor: &Executor, num_bytes: usize, repeats: usize) -> Result<f64> {
    if num_bytes < CHUNK_FLOATS * 4 {
        return Err(Error::invalid("num_bytes", format!("{num_bytes} bytes, expected 1 MiB or more")));
    }
    if repeats == 0 {
        return Err(Error::invalid("repeats", "0 repeats, expected 1 or more"));
    }
    let mut data: Vec<f32> = Vec::new();
    data.try_reserve_exact(num_bytes / 4).map_err(|_| Error::AllocationFailed { bytes: num_bytes })?;
    data.resize(num_bytes / 4, 1.0);
    let best = (0..=repeats).map(|_| read_seconds(executor, &data)).fold(f64::INFINITY, f64::min);
    Ok((data.len() * 4) as f64 / best / 1e9)
}

/// Seconds of one plain read of `data` by all threads: the roof of a launch over that very memory. How fast memory is depends
/// on where it lies, under a hypervisor by a factor of two.
pub fn read_seconds(executor: &Executor, data: &[f32]) -> f64 {
    let chunks: Vec<&[f32]> = data.chunks(CHUNK_FLOATS).collect();
    let start = Instant::now();
    executor.run(chunks.len(), size_of_val(data), |i| {
        std::hint::black_box(dispatch(executor.simd(), Sum(chunks[i])));
    });
    start.elapsed().as_secs_f64()
}

struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const UNROLL: usize = 8;
        let mut sums = [s.splat(0.0); UNROLL];
        let blocks = self.0.chunks_exact(UNROLL * S::LANES);
        let mut total: f32 = blocks.remainder().iter().sum();
        for block in blocks {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the block has UNROLL vectors.
                *sum = s.add(*sum, unsafe { s.load_f32(block.as_ptr().add(i * S::LANES)) });
            }
        }
        let mut lanes = [0.0; super::simd::MAX_LANES];
        for sum in sums {
            // SAFETY: no backend has more lanes than the array.
            unsafe { s.store_f32(lanes.as_mut_ptr(), sum) };
            total += lanes[..S::LANES].iter().sum::<f32>();
        }
        total
    }
}
