//! Behaviour of page tables: growth, sharing, windows.

use std::sync::Arc;

use paged_core::{Append, Error, PagePool, PageTable, pages_needed_by};

fn pool(num_pages: usize) -> Arc<PagePool> {
    Arc::new(PagePool::new(num_pages).unwrap())
}

fn table(pool: &Arc<PagePool>, page_size: usize, window: Option<usize>) -> PageTable {
    PageTable::new(Arc::clone(pool), page_size, window).unwrap()
}

#[test]
fn pages_come_on_demand() {
    let pool = pool(4);
    let mut table = table(&pool, 4, None);
    for (num_tokens, num_pages, last_page_len) in [(1, 1, 1), (3, 1, 4), (1, 2, 1), (7, 3, 4), (0, 3, 4)] {
        let before = table.pages().len();
        assert_eq!(table.pages_needed(num_tokens).unwrap(), num_pages - before);
        assert_eq!(table.append(num_tokens).unwrap().new_pages, table.pages()[before..]);
        assert_eq!((table.pages().len(), table.last_page_len()), (num_pages, last_page_len));
    }
    assert_eq!((table.num_tokens(), table.kv_len(), table.first_page_offset()), (12, 12, 0));
    table.check_integrity().unwrap();
}

#[test]
fn a_failed_append_changes_nothing() {
    let pool = pool(3);
    let mut table = table(&pool, 4, None);
    table.append(6).unwrap();
    assert_eq!(table.append(7), Err(Error::OutOfPages { needed: 2, free: 1 }));
    assert_eq!((table.num_tokens(), table.pages().len(), pool.num_free()), (6, 2, 1));
    for num_tokens in [i32::MAX as usize, usize::MAX] {
        assert!(matches!(
            table.append(num_tokens),
            Err(Error::InvalidArgument { argument: "num_tokens", .. })
        ));
        assert!(table.pages_needed(num_tokens).is_err());
    }
    table.append(2).unwrap();
    pool.check_integrity().unwrap();
}

#[test]
fn the_first_writer_of_a_shared_partial_page_copies_it() {
    let pool = pool(8);
    let mut parent = table(&pool, 4, None);
    parent.append(6).unwrap();
    let shared = parent.pages().to_vec();
    let mut fork = parent.fork().unwrap();
    assert_eq!((fork.pages(), fork.num_tokens(), pool.num_used()), (shared.as_slice(), 6, 2));

    assert_eq!(fork.pages_needed(1).unwrap(), 1);
    let append = fork.append(3).unwrap();
    assert_eq!(append.copies, [(shared[1], fork.pages()[1])]);
    assert_eq!(append.new_pages, fork.pages()[2..]);
    assert_eq!((fork.pages()[0], fork.pages().len()), (shared[0], 3));
    // The parent holds its last page alone again, and writes it in place.
    assert_eq!(parent.append(1).unwrap(), Append::default());
    assert_eq!(parent.pages(), shared);
}

#[test]
fn a_shared_full_page_is_not_copied() {
    let pool = pool(8);
    let mut parent = table(&pool, 4, None);
    parent.append(4).unwrap();
    let mut fork = parent.fork().unwrap();
    let append = fork.append(1).unwrap();
    assert_eq!((append.copies.len(), append.new_pages.len()), (0, 1));
    assert_eq!(fork.pages()[0], parent.pages()[0]);
}

#[test]
fn copy_on_write_without_a_page_left_changes_nothing() {
    let pool = pool(1);
    let mut parent = table(&pool, 4, None);
    parent.append(1).unwrap();
    let mut fork = parent.fork().unwrap();
    assert_eq!(fork.append(1), Err(Error::OutOfPages { needed: 1, free: 0 }));
    assert_eq!((fork.pages(), fork.num_tokens()), (parent.pages(), 1));
    drop(parent);
    assert_eq!(fork.append(1).unwrap(), Append::default());
}

#[test]
fn dropped_and_released_tables_leave_nothing() {
    let pool = pool(8);
    let mut table = table(&pool, 4, None);
    table.append(9).unwrap();
    let fork = table.fork().unwrap();
    table.release().unwrap();
    table.release().unwrap();
    assert_eq!((table.num_tokens(), table.pages().len(), pool.num_used()), (0, 0, 3));
    table.append(1).unwrap();
    drop((table, fork));
    assert_eq!(pool.num_used(), 0);
    pool.check_integrity().unwrap();
}

/// The last appended token sees exactly its window in the held pages, and no page beyond is kept.
#[test]
fn a_window_keeps_what_the_last_token_sees_and_no_more() {
    for page_size in [1, 2, 3, 4, 8] {
        for window in 1..12 {
            let pool = pool(64);
            let mut table = table(&pool, page_size, Some(window));
            for num_tokens in 1..40usize {
                table.append(1).unwrap();
                table.retire_head().unwrap();
                let first_visible = num_tokens.saturating_sub(window);
                assert_eq!(table.kv_len(), num_tokens - first_visible);
                assert_eq!(table.head_page(), first_visible / page_size);
                assert_eq!(table.first_page_offset(), first_visible % page_size);
                assert_eq!(table.num_held_tokens(), num_tokens - first_visible / page_size * page_size);
                assert_eq!(table.pages().len(), num_tokens.div_ceil(page_size) - first_visible / page_size);
                table.check_integrity().unwrap();
            }
            pool.check_integrity().unwrap();
        }
    }
}

#[test]
fn head_pages_are_given_back_once_a_whole_prompt_is_in() {
    let pool = pool(16);
    let mut table = table(&pool, 4, Some(5));
    table.append(30).unwrap();
    // Until then, earlier tokens of the prompt still look back at them.
    assert_eq!((table.first_page_offset(), table.pages().len(), table.num_held_tokens()), (25, 8, 30));
    let head = table.pages()[..6].to_vec();
    assert_eq!(table.retire_head().unwrap(), head);
    assert_eq!((table.first_page_offset(), table.pages().len(), pool.num_used()), (1, 2, 2));
    assert_eq!(table.retire_head().unwrap(), []);
}

#[test]
fn a_fork_keeps_the_pages_that_the_other_gives_back() {
    let pool = pool(16);
    let mut parent = table(&pool, 4, Some(4));
    parent.append(12).unwrap();
    let fork = parent.fork().unwrap();
    assert_eq!(parent.retire_head().unwrap().len(), 2);
    assert_eq!((fork.pages().len(), pool.num_used()), (3, 3));
    fork.check_integrity().unwrap();
}

#[test]
fn sizes_out_of_range_are_refused() {
    let pool = pool(1);
    let new = |page_size, window| PageTable::new(Arc::clone(&pool), page_size, window).err();
    for page_size in [0, usize::MAX] {
        assert!(matches!(new(page_size, None), Some(Error::InvalidArgument { argument: "page_size", .. })));
    }
    for window in [0, usize::MAX] {
        assert!(matches!(new(4, Some(window)), Some(Error::InvalidArgument { argument: "window", .. })));
    }
}

#[test]
fn adopted_pages_are_shared_and_growth_takes_fresh_ones() {
    let pool = pool(8);
    let mut first = table(&pool, 4, None);
    first.append(10).unwrap();
    let full = first.pages()[..2].to_vec();
    let mut second = table(&pool, 4, None);
    second.adopt(&full).unwrap();
    assert_eq!((second.num_tokens(), second.last_page_len(), pool.num_used()), (8, 4, 3));
    let append = second.append(1).unwrap();
    assert_eq!((append.new_pages.len(), append.copies.len()), (1, 0));
    drop(first);
    assert_eq!((second.pages()[..2].to_vec(), pool.num_used()), (full.clone(), 3));
    second.check_integrity().unwrap();
    assert!(matches!(second.adopt(&full), Err(Error::InvalidArgument { argument: "pages", .. })));
    drop(second);
    assert_eq!(pool.num_used(), 0);
    let mut late = table(&pool, 4, None);
    assert!(matches!(late.adopt(&full), Err(Error::Corrupt { .. })));
    assert!(late.adopt(&[8]).is_err());
    assert_eq!((late.num_tokens(), pool.num_used()), (0, 0));
    assert!(table(&pool, 4, Some(4)).adopt(&[]).is_err());
}

/// The question about many tables has the answer of appending to them, in order.
#[test]
fn the_pages_of_many_tables_are_those_that_appending_in_turn_takes() {
    for num_tokens in [0, 1, 3, 9] {
        let pool = pool(64);
        let mut tables: Vec<PageTable> = [0, 1, 3, 4, 6, 8].map(|len| filled(&pool, len)).into();
        // Three holders of one partial page in the batch, and two of another with one outside.
        let forks = [tables[4].fork().unwrap(), tables[4].fork().unwrap(), tables[2].fork().unwrap()];
        tables.extend(forks);
        let outside = tables[2].fork().unwrap();
        let needed = pages_needed_by(&tables.iter().collect::<Vec<_>>(), num_tokens).unwrap();
        let used = pool.num_used();
        let appends: Vec<Append> = tables.iter_mut().map(|table| table.append(num_tokens).unwrap()).collect();
        assert_eq!(pool.num_used() - used, needed, "{num_tokens} tokens");
        let num_copies: usize = appends.iter().map(|append| append.copies.len()).sum();
        // All but the last holder inside copy the first page, both holders inside the second.
        assert_eq!(num_copies, if num_tokens == 0 { 0 } else { 4 });
        drop((outside, tables));
        pool.check_integrity().unwrap();
        assert_eq!(pool.num_used(), 0);
    }
}

#[test]
fn the_pages_of_many_tables_are_asked_for_without_a_change() {
    let pools = [pool(4), pool(4)];
    let tables = [filled(&pools[0], 6), filled(&pools[1], 6)];
    let refused = pages_needed_by(&[&tables[0], &tables[1]], 1);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "tables", .. })));
    let too_many = pages_needed_by(&[&tables[0]], i32::MAX as usize);
    assert!(matches!(too_many, Err(Error::InvalidArgument { argument: "num_tokens", .. })));
    assert_eq!(pages_needed_by(&[&tables[0]], 3), Ok(1));
    assert_eq!(pages_needed_by::<&PageTable>(&[], 1), Ok(0));
    assert!(tables.iter().all(|table| table.num_tokens() == 6));
    assert_eq!(pools.map(|pool| pool.num_free()), [2, 2]);
}

fn filled(pool: &Arc<PagePool>, num_tokens: usize) -> PageTable {
    let mut table = table(pool, 4, None);
    table.append(num_tokens).unwrap();
    table
}
