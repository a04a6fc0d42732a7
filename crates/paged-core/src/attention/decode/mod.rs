//! One decode step of a whole batch: every row's last token against all the tokens that it sees.

mod batch;
mod item;
mod merge;
mod tile;

pub use batch::{DecodeBatch, WorkItem};

use batch::Work;
use item::{Destination, Item, MAX_ITEM_HEADS};
use merge::{Merge, Partials};

use super::append::{Append, Writes};
use super::executor::Executor;
use super::launch::{AttentionArguments, Launch};
use super::scratch::{with_launch_scratch, with_task_scratch};
use super::simd::dispatch;
use crate::error::Result;

/// Attention of `batch.rows.len()` queries over their pages, in one launch.
///
/// `out = softmax(sm_scale * q K^T) V` per row and query head, over the row's tokens (the last `window` of them), with
/// 1 to 16 query heads per KV head. Softmax and partial results are f32. A row without tokens gives 0 and an LSE of -inf,
/// or the sink's. With `new`, each row's last token is written to its page first. The same arguments give the same bits.
///
/// # Errors
/// `InvalidArgument` or `InvalidType` naming the argument, `InvalidPlan` if the work list does not cover the visible tokens,
/// `AllocationFailed` for the partial results of split rows. Nothing is written then.
pub fn decode(
    executor: &Executor,
    arguments: &AttentionArguments<'_>,
    batch: &DecodeBatch<'_>,
) -> Result<()> {
    let launch = Launch::new(arguments, batch.rows.len())?;
    batch.check(&launch.k)?;
    let work = batch.work(launch.softmax.window)?;
    let append = match &arguments.new {
        Some(new) => {
            batch.expect_a_token_per_row(new.k.name())?;
            let pools = (launch.k, launch.v);
            Some(Append::new(new, batch.rows.len(), &arguments.k_pages, &arguments.v_pages, pools)?)
        }
        None => None,
    };
    let mut partials_of_row: Vec<Vec<u32>> = Vec::new();
    let destinations = destinations(&work, &mut partials_of_row);
    let num_partials = partials_of_row.iter().map(Vec::len).sum();
    with_launch_scratch(|scratch| {
        let memory = scratch.try_floats(Partials::num_floats(num_partials, &launch))?;
        let partials = Partials::new(memory, num_partials, &launch);
        if let Some(append) = &append {
            dispatch(executor.simd(), Writes { append, places: batch.last_places(launch.k.page_size) });
        }
        run(executor, &launch, batch, &work, &destinations, partials);
        merge(executor, &launch, &work, &partials_of_row, partials);
        Ok(())
    })
}

/// Where each range goes. `partials_of_row` stays empty if no row is split.
fn destinations(work: &Work, partials_of_row: &mut Vec<Vec<u32>>) -> Vec<Destination> {
    let mut num_partials = 0;
    let destination = |range: &batch::Range| {
        if work.num_ranges[range.row] == 1 {
            return Destination::Output;
        }
        partials_of_row.resize(work.num_ranges.len(), Vec::new());
        partials_of_row[range.row].push(num_partials);
        num_partials += 1;
        Destination::Partial(num_partials as usize - 1)
    };
    work.ranges.iter().map(destination).collect()
}

fn run(
    executor: &Executor,
    launch: &Launch,
    batch: &DecodeBatch<'_>,
    work: &Work,
    destinations: &[Destination],
    partials: Partials,
) {
    let num_heads = launch.k.num_kv_heads;
    let item_heads = heads_per_item(executor, launch, work.ranges.len());
    let num_chunks = num_heads.div_ceil(item_heads);
    let num_bytes = work.num_tokens.saturating_mul(2 * num_heads * launch.k.row_bytes());
    executor.run(work.ranges.len() * num_chunks, num_bytes, |task| {
        let range = work.ranges[task / num_chunks];
        let first_head = task % num_chunks * item_heads;
        with_task_scratch(|scratch| {
            dispatch(
                executor.simd(),
                Item {
                    launch,
                    scratch,
                    row: range.row,
                    kv_heads: first_head..(first_head + item_heads).min(num_heads),
                    pages: batch.rows[range.row].page_ids,
                    begin: range.begin,
                    end: range.end,
                    destination: destinations[task / num_chunks],
                    partials,
                },
            );
        });
    });
}

/// One KV head per item where its tokens follow each other in memory. Else enough neighbouring heads for runs of 1 KiB, as
/// long as every thread has several items.
fn heads_per_item(executor: &Executor, launch: &Launch, num_ranges: usize) -> usize {
    const RUN_BYTES: usize = 1024;
    if launch.k.is_dense() {
        return 1;
    }
    let for_runs = RUN_BYTES.div_ceil(launch.k.row_bytes());
    let for_threads = num_ranges * launch.k.num_kv_heads / (2 * executor.num_threads());
    for_runs.min(for_threads).clamp(1, MAX_ITEM_HEADS)
}

fn merge(
    executor: &Executor,
    launch: &Launch,
    work: &Work,
    partials_of_row: &[Vec<u32>],
    partials: Partials,
) {
    // Rows of one range wrote their output themselves; those of none have the empty merge.
    let rows: Vec<usize> = (0..work.num_ranges.len()).filter(|row| work.num_ranges[*row] != 1).collect();
    let num_floats = Partials::num_floats(partials_of_row.iter().map(Vec::len).sum(), launch);
    executor.run(rows.len(), num_floats * size_of::<f32>(), |task| {
        let row = rows[task];
        let of_row = partials_of_row.get(row).map_or(&[][..], |partials| partials);
        with_task_scratch(|scratch| {
            let accumulator = &mut scratch.floats(launch.head_dim)[..launch.head_dim];
            dispatch(executor.simd(), Merge { launch, partials, row, of_row, accumulator });
        });
    });
}
