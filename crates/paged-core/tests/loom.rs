//! Loom models of everything that is lock-free: every interleaving, up to a number of preemptions, and every value that the
//! memory model lets a load return.
//!
//! Run with `make loom`: `RUSTFLAGS="--cfg paged_loom" LOOM_MAX_PREEMPTIONS=2 cargo test --release -p paged-core --test loom`.
//! Loom treats `Relaxed` more strictly than hardware does; the code under test uses it only for the writer's own values.
#![cfg(paged_loom)]

use std::sync::Arc;

use loom::sync::Mutex;
use loom::thread;
use paged_core::plan::{DecodePlan, PlanConfig, PlanSnapshot};
use paged_core::{BlockBudget, DecodeRows, Error, Gate, HeadGeometry, PagePool, PageTable};

fn pool(num_pages: usize) -> Arc<PagePool> {
    Arc::new(PagePool::new(num_pages).unwrap())
}

#[test]
fn free_list_gives_no_page_to_two_holders() {
    loom::model(|| {
        let pool = pool(2);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || other.acquire(1).unwrap());
        let mut pages = pool.acquire(1).unwrap();
        pages.extend(thread.join().unwrap());
        pages.sort_unstable();
        assert_eq!(pages, [0, 1]);
        pool.check_integrity().unwrap();
    });
}

/// The pattern that breaks an untagged list: a page is popped, its successor popped, and the page pushed back while another
/// thread still holds the old head.
#[test]
fn free_list_survives_pop_and_push_behind_its_back() {
    loom::model(|| {
        let pool = pool(3);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            let first = other.acquire(1).unwrap();
            let second = other.acquire(1);
            other.release(&first).unwrap();
            second
        });
        let mine = pool.acquire(1).unwrap();
        let theirs = thread.join().unwrap().unwrap();
        assert_ne!(mine, theirs);
        assert_eq!(pool.num_free(), 1);
        pool.check_integrity().unwrap();
    });
}

#[test]
fn acquire_of_several_pages_is_all_or_nothing() {
    loom::model(|| {
        let pool = pool(3);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || other.acquire(2));
        let results = [pool.acquire(2), thread.join().unwrap()];
        // Two pages each do not fit: exactly one call succeeds, and the other has taken nothing.
        let won: Vec<_> = results.iter().flatten().collect();
        assert_eq!(won.len(), 1);
        assert!(results.contains(&Err(Error::OutOfPages { needed: 2, free: 1 })));
        pool.release(won[0]).unwrap();
        assert_eq!(pool.num_free(), 3);
        pool.check_integrity().unwrap();
    });
}

/// The other thread holds both pages or none, so one free page is never a true answer; a walk of the list that met the change
/// halfway would give it.
#[test]
fn acquire_counts_the_pages_of_one_moment() {
    loom::model(|| {
        let pool = pool(2);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            if let Ok(pages) = other.acquire(2) {
                // Turns the order of the list around.
                other.release(&[pages[1], pages[0]]).unwrap();
            }
        });
        match pool.acquire(2) {
            Ok(pages) => pool.release(&pages).unwrap(),
            Err(error) => assert_eq!(error, Error::OutOfPages { needed: 2, free: 0 }),
        }
        thread.join().unwrap();
        pool.check_integrity().unwrap();
    });
}

#[test]
fn refcount_frees_a_page_once_with_its_last_holder() {
    loom::model(|| {
        let pool = pool(1);
        let page = pool.acquire(1).unwrap();
        pool.retain(&page).unwrap();
        let (other, same) = (Arc::clone(&pool), page.clone());
        let thread = thread::spawn(move || other.release(&same).unwrap());
        pool.release(&page).unwrap();
        thread.join().unwrap();
        assert_eq!(pool.num_free(), 1);
        pool.check_integrity().unwrap();
    });
}

#[test]
fn refcount_retain_races_with_the_release_of_another_holder() {
    loom::model(|| {
        let pool = pool(2);
        let page = pool.acquire(1).unwrap();
        pool.retain(&page).unwrap();
        let (other, same) = (Arc::clone(&pool), page.clone());
        let thread = thread::spawn(move || other.release(&same).unwrap());
        // This thread is a holder throughout, so its retain can't fail and the page can't be given away.
        pool.retain(&page).unwrap();
        assert_eq!(pool.acquire(1).unwrap(), [1]);
        thread.join().unwrap();
        assert_eq!(pool.refcount(page[0]).unwrap(), 2);
        pool.check_integrity().unwrap();
    });
}

#[test]
fn double_release_from_two_threads_is_refused_once() {
    loom::model(|| {
        let pool = pool(1);
        let page = pool.acquire(1).unwrap();
        let (other, same) = (Arc::clone(&pool), page.clone());
        let thread = thread::spawn(move || other.release(&same).is_ok());
        let results = [pool.release(&page).is_ok(), thread.join().unwrap()];
        assert_eq!(results.iter().filter(|&&ok| ok).count(), 1);
        assert_eq!(pool.num_free(), 1);
        pool.check_integrity().unwrap();
    });
}

#[test]
fn reservations_never_exceed_the_budget() {
    loom::model(|| {
        let budget = BlockBudget::new(3, 0, 1).unwrap();
        let other = budget.clone();
        let thread =
            thread::spawn(move || other.reserve(2).is_ok_and(|reservation| reservation.num_pages() == 2));
        let mine = budget.reserve(2);
        assert!(budget.num_reserved() <= 3);
        let was_given = thread.join().unwrap();
        // The other's reservation ended with its thread, so one of the two calls at least has succeeded.
        assert!(mine.is_ok() || was_given);
        drop(mine);
        assert_eq!(budget.num_available(), 3);
    });
}

#[test]
fn a_reservation_hands_over_what_its_owner_wrote() {
    loom::model(|| {
        let budget = BlockBudget::new(1, 0, 1).unwrap();
        let mut reservation = budget.reserve(1).unwrap();
        let cell = Arc::new(loom::cell::UnsafeCell::new(0));
        let (other, same) = (budget.clone(), Arc::clone(&cell));
        let thread = thread::spawn(move || {
            if other.reserve(1).is_ok() {
                // SAFETY: the reservation was given back after the other thread's write; loom checks that the two are ordered.
                assert_eq!(same.with(|value| unsafe { *value }), 7);
            }
        });
        // SAFETY: only the holder of the one page touches the cell; loom checks it.
        cell.with_mut(|value| unsafe { *value = 7 });
        reservation.release();
        thread.join().unwrap();
    });
}

fn plan() -> DecodePlan {
    let heads = HeadGeometry { num_qo_heads: 1, num_kv_heads: 1, head_dim: 1 };
    let mut config = PlanConfig::new(1, 2, 8, 2, heads);
    config.num_work_items = Some(1);
    config.num_workers = Some(1);
    DecodePlan::new(config).unwrap()
}

/// A state is consistent if its lengths, pages and position are those of one moment.
fn assert_consistent(snapshot: &PlanSnapshot, states: &[(u64, i32, &[i32])]) {
    let csr = &snapshot.csr;
    let length = csr.lengths.first().copied().unwrap_or(-1);
    let found = (snapshot.epoch, length, csr.indices.as_slice());
    assert!(states.contains(&found), "{snapshot:?}");
    assert_eq!(csr.positions, csr.lengths);
}

#[test]
fn plan_readers_see_whole_advances() {
    loom::model(|| {
        let mut plan = plan();
        plan.admit(&[3, 5], 1, 0, None).unwrap();
        plan.ensure_work_list();
        let reader = plan.reader();
        let thread = thread::spawn(move || reader.try_snapshot());
        plan.advance().unwrap();
        plan.advance().unwrap();
        if let Some(snapshot) = thread.join().unwrap() {
            assert_consistent(&snapshot, &[(2, 1, &[3]), (3, 2, &[3]), (4, 3, &[3, 5])]);
        }
        // Nobody is writing now: a reader succeeds.
        assert_consistent(&plan.reader().try_snapshot().unwrap(), &[(4, 3, &[3, 5])]);
    });
}

#[test]
fn plan_readers_see_whole_page_crossings() {
    loom::model(|| {
        let mut plan = plan();
        let slot = plan.admit(&[3], 2, 0, None).unwrap();
        let reader = plan.reader();
        let thread = thread::spawn(move || reader.try_snapshot());
        plan.append_page(slot, 6).unwrap();
        plan.advance().unwrap();
        if let Some(snapshot) = thread.join().unwrap() {
            assert_consistent(&snapshot, &[(1, 2, &[3]), (2, 2, &[3]), (3, 3, &[3, 6])]);
        }
    });
}

#[test]
fn plan_readers_see_whole_changes_of_tenant() {
    loom::model(|| {
        let mut plan = plan();
        let first = plan.admit(&[3], 1, 0, None).unwrap();
        let reader = plan.reader();
        let thread = thread::spawn(move || reader.try_snapshot());
        plan.retire(first).unwrap();
        let second = plan.admit(&[4], 2, 0, None).unwrap();
        assert_ne!(first, second);
        if let Some(snapshot) = thread.join().unwrap() {
            assert_consistent(&snapshot, &[(1, 1, &[3]), (2, -1, &[]), (3, 2, &[4])]);
            let expected = [vec![first], vec![], vec![second]];
            assert_eq!(snapshot.slots, expected[snapshot.epoch as usize - 1]);
        }
    });
}

/// The owner of a launch takes its work back after `close`: a helper that is still inside, or comes later, would be a data race.
#[test]
fn a_closed_gate_leaves_nobody_inside() {
    loom::model(|| {
        let gate = Arc::new(Gate::new());
        let work = Arc::new(loom::cell::UnsafeCell::new(0));
        let helpers: Vec<_> = (0..2)
            .map(|_| {
                let (gate, work) = (Arc::clone(&gate), Arc::clone(&work));
                thread::spawn(move || {
                    if gate.enter() {
                        // SAFETY: inside the gate the work is only read.
                        work.with(|work| assert_eq!(unsafe { *work }, 0));
                        gate.leave();
                    }
                })
            })
            .collect();
        gate.close(thread::yield_now);
        // SAFETY: nobody is inside.
        work.with_mut(|work| unsafe { *work = 1 });
        for helper in helpers {
            helper.join().unwrap();
        }
    });
}

#[test]
fn what_helpers_did_is_seen_after_the_gate_closed() {
    loom::model(|| {
        let gate = Arc::new(Gate::new());
        let result = Arc::new(loom::cell::UnsafeCell::new(0));
        let entered = gate.enter();
        assert!(entered);
        let (inside, written) = (Arc::clone(&gate), Arc::clone(&result));
        let helper = thread::spawn(move || {
            // SAFETY: the owner reads only after the gate has closed.
            written.with_mut(|result| unsafe { *result = 7 });
            inside.leave();
        });
        gate.close(thread::yield_now);
        // SAFETY: the helper has left.
        result.with(|result| assert_eq!(unsafe { *result }, 7));
        helper.join().unwrap();
    });
}

/// A batch of one row with two tokens in a page of eight, and its table.
fn batch_of_one(pool: &Arc<PagePool>) -> (DecodePlan, DecodeRows, Arc<Mutex<PageTable>>) {
    let heads = HeadGeometry { num_qo_heads: 1, num_kv_heads: 1, head_dim: 64 };
    let mut plan = DecodePlan::new(PlanConfig::new(1, 4, 4, 8, heads)).unwrap();
    let mut rows = DecodeRows::new([(&plan, Arc::clone(pool))]).unwrap();
    let mut table = PageTable::new(Arc::clone(pool), 8, None).unwrap();
    table.append(2).unwrap();
    rows.admit(0, &mut plan, &mut table).unwrap();
    // The first step looks at the new row.
    assert!(rows.try_advance(&mut [&mut plan]).unwrap());
    (plan, rows, Arc::new(Mutex::new(table)))
}

/// A step that touches no table, against an append that the batch has not made: no token is lost, none is counted twice.
#[test]
fn step_is_counted_before_a_table_leaves_the_clock_or_refused() {
    loom::model(|| {
        let pool = pool(4);
        let (mut plan, mut rows, table) = batch_of_one(&pool);
        let mine = Arc::clone(&table);
        let thread = thread::spawn(move || {
            let mut table = mine.lock().unwrap();
            let before = table.num_tokens();
            table.append(2).unwrap();
            let added = table.num_tokens() - before;
            assert!(added == 2 || added == 3, "the append and at most one step");
        });
        let advanced = rows.try_advance(&mut [&mut plan]).unwrap();
        thread.join().unwrap();
        assert_eq!(table.lock().unwrap().num_tokens(), 3 + 2 + usize::from(advanced));
        assert!(!rows.try_advance(&mut [&mut plan]).unwrap(), "the table has left the clock");
        let grown = rows.advance(&mut [&mut plan], |_| Ok(vec![table.lock().unwrap()])).unwrap();
        assert!(grown.is_empty());
        assert_eq!(table.lock().unwrap().num_tokens(), 3 + 2 + usize::from(advanced) + 1);
        assert!(rows.try_advance(&mut [&mut plan]).unwrap());
    });
}

/// A page that gets a second holder while a step runs is copied in the next one at the latest.
#[test]
fn step_after_a_page_got_another_holder_finds_it() {
    loom::model(|| {
        let pool = pool(4);
        let (mut plan, mut rows, table) = batch_of_one(&pool);
        let pages = table.lock().unwrap().pages().to_vec();
        let (other, same) = (Arc::clone(&pool), pages.clone());
        let thread = thread::spawn(move || other.retain(&same).unwrap());
        let advanced = rows.try_advance(&mut [&mut plan]).unwrap();
        thread.join().unwrap();
        assert!(!rows.try_advance(&mut [&mut plan]).unwrap(), "the page is shared for certain");
        let grown = rows.advance(&mut [&mut plan], |_| Ok(vec![table.lock().unwrap()])).unwrap();
        assert_eq!(grown[0].append.copies[0].0, pages[0]);
        assert_eq!(table.lock().unwrap().num_tokens(), 3 + usize::from(advanced) + 1);
        assert_eq!(pool.refcount(pages[0]).unwrap(), 1);
    });
}
