//! Behaviour of the page pool, from one thread and from several.

use std::sync::Arc;

use paged_core::{Error, PagePool};

fn counts(pool: &PagePool) -> Vec<u32> {
    (0..pool.num_pages() as u32).map(|page| pool.refcount(page).unwrap()).collect()
}

fn is_corrupt(result: Result<(), Error>) -> bool {
    matches!(result, Err(Error::Corrupt { .. }))
}

#[test]
fn acquire_gives_distinct_pages_until_the_pool_is_empty() {
    let pool = PagePool::new(5).unwrap();
    let mut pages = pool.acquire(2).unwrap();
    pages.extend(pool.acquire(3).unwrap());
    pages.sort_unstable();
    assert_eq!(pages, [0, 1, 2, 3, 4]);
    assert_eq!((pool.num_free(), pool.num_used()), (0, 5));
    assert_eq!(pool.acquire(1), Err(Error::OutOfPages { needed: 1, free: 0 }));
    assert_eq!(pool.acquire(0), Ok(vec![]));
}

#[test]
fn a_failed_acquire_takes_nothing() {
    let pool = PagePool::new(4).unwrap();
    let held = pool.acquire(1).unwrap();
    for needed in [4, 5, usize::MAX] {
        assert_eq!(pool.acquire(needed), Err(Error::OutOfPages { needed, free: 3 }));
        assert_eq!(pool.num_free(), 3);
    }
    assert_eq!(pool.acquire(3).unwrap().len(), 3);
    pool.release(&held).unwrap();
    pool.check_integrity().unwrap();
}

#[test]
fn a_page_returns_with_its_last_holder() {
    let pool = PagePool::new(2).unwrap();
    let page = pool.acquire(1).unwrap();
    assert!(!pool.is_shared(page[0]).unwrap());
    pool.retain(&[page[0], page[0]]).unwrap();
    assert_eq!(pool.refcount(page[0]), Ok(3));
    assert!(pool.is_shared(page[0]).unwrap());
    pool.release(&[page[0], page[0]]).unwrap();
    assert_eq!(pool.num_free(), 1);
    pool.release(&page).unwrap();
    assert_eq!(pool.num_free(), 2);
    pool.check_integrity().unwrap();
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let pool = PagePool::new(6).unwrap();
    let pages = pool.acquire(3).unwrap();
    pool.retain(&pages[1..2]).unwrap();
    let (a, shared, free) = (pages[0], pages[1], 5);
    let before = counts(&pool);

    assert!(is_corrupt(pool.retain(&[a, free])), "retain of a free page");
    assert!(is_corrupt(pool.release(&[a, free])), "release of a free page");
    assert!(
        is_corrupt(pool.release(&[shared, a, shared, a])),
        "one release too many of a page with one holder"
    );
    assert!(is_corrupt(pool.release(&[shared, shared, a, shared])), "one release too many of a shared page");
    for outside in [6, u32::MAX] {
        for result in
            [pool.retain(&[a, outside]), pool.release(&[a, outside]), pool.refcount(outside).map(|_| ())]
        {
            assert!(matches!(result, Err(Error::InvalidArgument { .. })), "page {outside} is outside");
        }
    }
    assert_eq!(counts(&pool), before);
    pool.check_integrity().unwrap();
    pool.release(&[shared, a, shared]).unwrap();
    assert!(is_corrupt(pool.release(&[a])), "double release");
    pool.check_integrity().unwrap();
}

#[test]
fn sizes_out_of_range_are_refused() {
    for num_pages in [0, i32::MAX as usize + 1, usize::MAX] {
        assert!(matches!(
            PagePool::new(num_pages),
            Err(Error::InvalidArgument { argument: "num_pages", .. })
        ));
    }
}

#[test]
fn a_huge_pool_costs_memory_only_for_pages_in_use() {
    let pool = PagePool::new(i32::MAX as usize);
    // 16 GiB of address space; a system that does not promise so much says so instead of dying.
    match pool {
        Ok(pool) => assert_eq!(pool.acquire(3).unwrap(), [0, 1, 2]),
        Err(error) => assert!(matches!(error, Error::AllocationFailed { .. })),
    }
}

#[test]
fn threads_share_a_pool_without_losing_a_page() {
    let pool = Arc::new(PagePool::new(64).unwrap());
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || {
                let mut held: Vec<u32> = Vec::new();
                let mut random = seed + 1u32;
                for _ in 0..20_000 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let count = (random >> 24) as usize % 8;
                    if random & 1 == 0
                        && let Ok(pages) = pool.acquire(count)
                    {
                        pool.retain(&pages).unwrap();
                        pool.release(&pages).unwrap();
                        held.extend(pages);
                    } else {
                        pool.release(&held.split_off(held.len().saturating_sub(count))).unwrap();
                    }
                }
                pool.release(&held).unwrap();
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(pool.num_free(), 64);
    pool.check_integrity().unwrap();
}
