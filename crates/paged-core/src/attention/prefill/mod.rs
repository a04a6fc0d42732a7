//! Causal attention of the last tokens of one sequence over its pages.

mod gemm;
mod softmax;
mod tile;

use super::append::{Append, Writes};
use super::executor::Executor;
use super::launch::{AttentionArguments, Launch};
use super::scratch::with_task_scratch;
use super::sequence::PagedSequence;
use super::simd::dispatch;
use crate::error::{Error, Result};
use tile::QueryTile;

/// Rows (query tokens x query heads of a group) of a tile: whole micro-kernel rows, and enough of them that packing K and V
/// costs little beside using them.
const TILE_ROWS: usize = 16 * gemm::MICRO_ROWS;

/// Attention of the last `T` of a sequence's tokens, each over the tokens up to itself (the last `window` of them).
///
/// Everything else is as in [`decode`](super::decode()): one query row per token, `new` is written to its pages first, and the
/// result is that of `T` single decode steps up to rounding. Blocks of keys are taken in order with a running softmax
/// (FlashAttention, arXiv 2205.14135), so no score matrix is stored.
///
/// # Errors
/// `InvalidArgument` or `InvalidType` naming the argument. Nothing is written then.
pub fn prefill(
    executor: &Executor,
    arguments: &AttentionArguments<'_>,
    sequence: PagedSequence<'_>,
) -> Result<()> {
    let num_queries = arguments.q.shape()[0];
    let launch = Launch::new(arguments, num_queries)?;
    sequence.check(&launch.k)?;
    let Some(first_query) = sequence.num_tokens.checked_sub(num_queries) else {
        let held = sequence.num_tokens;
        return Err(Error::invalid(
            "num_tokens",
            format!("{held} tokens are fewer than the {num_queries} queries"),
        ));
    };
    if let Some(new) = &arguments.new {
        let pools = (launch.k, launch.v);
        let append = Append::new(new, num_queries, &arguments.k_pages, &arguments.v_pages, pools)?;
        let places = sequence.places_of_last(num_queries, launch.k.page_size);
        dispatch(executor.simd(), Writes { append: &append, places });
    }
    let tile_tokens = (TILE_ROWS / launch.group_size).max(1);
    let num_tiles = num_queries.div_ceil(tile_tokens);
    let num_heads = launch.k.num_kv_heads;
    // Arithmetic in units of what a thread does in the time of a byte: several multiply-adds.
    let num_bytes = num_queries.saturating_mul(sequence.num_tokens).saturating_mul(launch.num_qo_heads) * 4;
    executor.run(num_tiles * num_heads, num_bytes, |task| {
        // The last tile sees the most keys: long tasks first.
        let begin = (num_tiles - 1 - task / num_heads) * tile_tokens;
        with_task_scratch(|scratch| {
            dispatch(
                executor.simd(),
                QueryTile {
                    launch: &launch,
                    scratch,
                    sequence,
                    kv_head: task % num_heads,
                    first_query,
                    begin,
                    end: (begin + tile_tokens).min(num_queries),
                },
            );
        });
    });
    Ok(())
}
