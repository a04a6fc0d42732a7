//! Behaviour of the plan's row table: slots, edits, CSR, and readers on other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paged_core::plan::{Csr, CsrView, DecodePlan, PlanArray, PlanConfig, import_config};
use paged_core::{Error, HeadGeometry};

const HEADS: HeadGeometry = HeadGeometry { num_qo_heads: 8, num_kv_heads: 2, head_dim: 64 };

fn config() -> PlanConfig {
    PlanConfig::new(4, 6, 100, 4, HEADS)
}

fn plan() -> DecodePlan {
    DecodePlan::new(config()).unwrap()
}

fn argument(error: Error) -> &'static str {
    match error {
        Error::InvalidArgument { argument, .. } => argument,
        other => panic!("{other:?} is not about an argument"),
    }
}

#[test]
fn rows_are_in_order_of_admission_whatever_leaves() {
    let mut plan = plan();
    let slots: Vec<_> = (0..4).map(|page| plan.admit(&[page], 1, 0, None).unwrap()).collect();
    assert_eq!(plan.admit(&[9], 1, 0, None), Err(Error::PlanFull { what: "slots", needed: 5, capacity: 4 }));
    plan.retire(slots[1]).unwrap();
    let late = plan.admit(&[50], 1, 0, None).unwrap();
    assert_eq!(late.index, slots[1].index);
    assert_ne!(late.generation, slots[1].generation);
    assert_eq!(plan.export_csr().indices, [0, 2, 3, 50]);
    for (row, slot) in [slots[0], slots[2], slots[3], late].into_iter().enumerate() {
        assert_eq!((plan.row_of(slot), plan.slot_of(row)), (Ok(row), Ok(slot)));
    }
    assert!(plan.slot_of(4).is_err() && plan.row(4).is_none() && plan.slot_row(9).is_none());
}

#[test]
fn the_same_shape_with_other_tenants_is_another_state() {
    let mut plan = plan();
    let first = plan.admit(&[1], 3, 0, None).unwrap();
    let before = plan.identity();
    let csr = plan.export_csr();
    plan.retire(first).unwrap();
    let second = plan.admit(&[1], 3, 0, None).unwrap();
    assert_eq!(plan.export_csr(), csr);
    assert_eq!(first.index, second.index);
    assert_ne!(plan.identity(), before);
    assert_eq!(plan.retire(first), Err(Error::StaleSlot { index: 0, expected: 0, found: 1 }));
}

#[test]
fn every_edit_bumps_the_epoch_once_and_a_refused_one_never() {
    let mut plan = plan();
    let slot = plan.admit(&[1, 2], 8, 0, None).unwrap();
    assert_eq!(plan.epoch(), 1);
    assert!(
        plan.advance().is_err()
            && plan.append_page(slot, 100).is_err()
            && plan.admit(&[1], 5, 0, None).is_err()
    );
    assert_eq!(plan.epoch(), 1);
    plan.append_page(slot, 3).unwrap();
    plan.advance().unwrap();
    plan.replace_page(slot, 2, 9).unwrap();
    plan.retire_head_pages(slot, 1, 0).unwrap();
    plan.retire(slot).unwrap();
    assert_eq!(plan.epoch(), 6);
    assert!(plan.ensure_work_list());
    assert!(!plan.ensure_work_list());
}

#[test]
fn admit_refuses_what_does_not_fit_together() {
    let mut plan = plan();
    let mut refused = |pages: &[u32], num_tokens, offset, position| {
        argument(plan.admit(pages, num_tokens, offset, position).unwrap_err())
    };
    assert_eq!(refused(&[100], 1, 0, None), "pages");
    assert_eq!(refused(&[u32::MAX], 1, 0, None), "pages");
    assert_eq!(refused(&[1], 5, 0, None), "num_tokens");
    assert_eq!(refused(&[1], 4, 1, None), "num_tokens");
    assert_eq!(refused(&[], 1, 0, None), "num_tokens");
    assert_eq!(refused(&[1], usize::MAX, 0, None), "num_tokens");
    assert_eq!(refused(&[1, 2], 1, 4, None), "first_page_offset");
    assert_eq!(refused(&[1], 0, 1, None), "first_page_offset");
    assert_eq!(refused(&[1], 2, 0, Some(1)), "position");
    assert_eq!(refused(&[1], 2, 0, Some(usize::MAX)), "position");
    let full = Error::PlanFull { what: "pages of a row", needed: 7, capacity: 6 };
    assert_eq!(plan.admit(&[1; 7], 1, 0, None), Err(full));
    assert_eq!((plan.epoch(), plan.num_rows()), (0, 0));
}

#[test]
fn spare_pages_are_held_but_not_exported() {
    let mut plan = plan();
    let slot = plan.admit(&[7, 8, 9], 3, 2, Some(30)).unwrap();
    assert_eq!(plan.row(0).unwrap().pages, [7, 8, 9]);
    let expected = Csr {
        indptr: vec![0, 2],
        indices: vec![7, 8],
        last_page_len: vec![1],
        first_page_offset: vec![2],
        lengths: vec![3],
        positions: vec![30],
    };
    assert_eq!(plan.export_csr(), expected);
    (0..7).for_each(|_| plan.advance().unwrap());
    assert_eq!(plan.rows_needing_page(), [slot]);
    assert!(matches!(plan.advance(), Err(Error::InvalidPlan { .. })));
    assert_eq!(plan.export_csr().positions, [37]);
}

#[test]
fn an_empty_row_can_grow() {
    let mut plan = plan();
    let slot = plan.admit(&[], 0, 0, None).unwrap();
    plan.admit(&[5], 0, 0, None).unwrap();
    assert_eq!(plan.export_csr().indptr, [0, 0, 0]);
    plan.ensure_work_list();
    assert_eq!(plan.work().unwrap().items.len(), 2);
    assert_eq!(plan.rows_needing_page(), [slot]);
    plan.append_page(slot, 6).unwrap();
    plan.advance().unwrap();
    assert_eq!((plan.export_csr().indices, plan.export_csr().lengths), (vec![6, 5], vec![1, 1]));
}

#[test]
fn a_window_row_moves_through_its_storage_for_ever() {
    let mut plan = DecodePlan::new(PlanConfig { window: Some(8), ..config() }).unwrap();
    let slot = plan.admit(&[0, 1, 2], 12, 0, None).unwrap();
    for page in 3..1000 {
        plan.append_page(slot, page % 100).unwrap();
        (0..4).for_each(|_| plan.advance().unwrap());
        plan.retire_head_pages(slot, 1, 0).unwrap();
        let expected: Vec<i32> = (page - 2..=page).map(|page| (page % 100) as i32).collect();
        assert_eq!(plan.row(0).unwrap().pages, expected);
        assert_eq!((plan.row(0).unwrap().length, plan.row(0).unwrap().position), (12, 4 * page as usize + 4));
    }
    plan.validate().unwrap();
}

#[test]
fn visible_tokens_cannot_be_dropped() {
    let mut plan = DecodePlan::new(PlanConfig { window: Some(5), ..config() }).unwrap();
    let slot = plan.admit(&[0, 1, 2], 10, 1, None).unwrap();
    // 10 tokens from offset 1; the next token sees the last 4: at most 6 may go, up to offset 7 = page 1, entry 3.
    for (num_pages, offset) in [(2, 0), (3, 0), (0, 0), (4, 0), (1, 4), (usize::MAX, 0), (0, usize::MAX)] {
        let is_refused =
            matches!(plan.retire_head_pages(slot, num_pages, offset), Err(Error::InvalidArgument { .. }));
        assert!(is_refused, "{num_pages} pages, offset {offset}");
    }
    assert_eq!(plan.epoch(), 1);
    plan.retire_head_pages(slot, 1, 3).unwrap();
    assert_eq!(plan.row(0).unwrap().length, 4);
    plan.validate().unwrap();
}

#[test]
fn imported_arrays_come_back_as_they_were() {
    let (indptr, indices) = ([0, 2, 2, 5], [4, 4, 1, 2, 3, -7, 999]);
    let csr = CsrView {
        indptr: &indptr,
        indices: &indices,
        last_page_len: &[1, 0, 4],
        first_page_offset: Some(&[3, 0, 0]),
    };
    let plan = DecodePlan::from_csr(csr, import_config(&csr, 5, 4, HEADS)).unwrap();
    let exported = plan.export_csr();
    assert_eq!((&exported.indptr[..], &exported.indices[..]), (&indptr[..], &indices[..5]));
    assert_eq!((exported.lengths, exported.positions), (vec![2, 0, 12], vec![2, 0, 12]));
    assert_eq!((exported.last_page_len, exported.first_page_offset), (vec![1, 0, 4], vec![3, 0, 0]));
    plan.validate().unwrap();
}

#[test]
fn arrays_that_break_an_invariant_are_refused() {
    let refused = |indptr: &[i32], indices: &[i32], last_page_len: &[i32], offsets: Option<&[i32]>| {
        let csr = CsrView { indptr, indices, last_page_len, first_page_offset: offsets };
        let result = DecodePlan::from_csr(csr, import_config(&csr, 10, 4, HEADS));
        match result.err() {
            Some(Error::InvalidPlan { message }) => message,
            other => panic!("{csr:?} gave {other:?}"),
        }
    };
    assert!(refused(&[], &[], &[], None).contains("indptr has 0 entries"));
    assert!(refused(&[0, 1], &[1], &[1, 1], None).contains("indptr has 2 entries"));
    assert!(refused(&[0, 1], &[1], &[1], Some(&[])).contains("first_page_offset 0"));
    assert!(refused(&[1, 1], &[1], &[1], None).contains("indptr[0] is 1"));
    assert!(refused(&[0, 2, 1], &[1, 2], &[1, 1], None).contains("decreases at row 1: 2 to 1"));
    assert!(refused(&[0, 2], &[1], &[1], None).contains("ends at 2, indices has 1"));
    assert!(refused(&[0, i32::MAX], &[1], &[1], None).contains("indices has 1"));
    assert!(refused(&[0, 1], &[10], &[1], None).contains("indices[0] is 10, expected 0..10"));
    assert!(refused(&[0, 1], &[-1], &[1], None).contains("indices[0] is -1"));
    for last in [0, 5, -1, i32::MIN, i32::MAX] {
        assert!(refused(&[0, 1], &[1], &[last], None).contains("last_page_len outside 1..=page_size"));
    }
    for offset in [4, -1, i32::MAX] {
        assert!(
            refused(&[0, 2], &[1, 2], &[1], Some(&[offset]))
                .contains("first_page_offset outside 0..page_size")
        );
    }
    assert!(refused(&[0, 1], &[1], &[2], Some(&[2])).contains("pages without a token"));
    assert!(refused(&[0, 0], &[], &[1], None).contains("row 0 has 0 pages"));
    assert!(refused(&[0, 0], &[], &[0], Some(&[1])).contains("row 0 has 0 pages"));
}

#[test]
fn a_refused_rebuild_keeps_the_old_rows() {
    let mut plan = plan();
    let slot = plan.admit(&[1], 2, 0, None).unwrap();
    let before = (plan.identity(), plan.export_csr());
    let rows =
        |count: usize| Csr { indptr: vec![0; count + 1], last_page_len: vec![0; count], ..Csr::default() };
    let mut five = rows(5);
    five.first_page_offset = vec![0; 5];
    assert!(matches!(plan.rebuild(five.view(), None), Err(Error::PlanFull { what: "slots", .. })));
    let long = [0; 7];
    let csr = CsrView { indptr: &[0, 7], indices: &long, last_page_len: &[1], first_page_offset: None };
    assert!(matches!(plan.rebuild(csr, None), Err(Error::PlanFull { what: "pages of a row", .. })));
    let csr = CsrView { indptr: &[0, 1], indices: &long, last_page_len: &[3], first_page_offset: None };
    for positions in [&[][..], &[2], &[i32::MAX], &[-1]] {
        assert!(matches!(plan.rebuild(csr, Some(positions)), Err(Error::InvalidPlan { .. })));
    }
    assert_eq!((plan.identity(), plan.export_csr()), before);
    plan.rebuild(csr, Some(&[9])).unwrap();
    assert!(plan.row_of(slot).is_err());
}

#[test]
fn positions_stop_at_the_largest_int32() {
    let mut plan = plan();
    let slot = plan.admit(&[1], 1, 0, Some(i32::MAX as usize - 1)).unwrap();
    plan.admit(&[2], 1, 0, None).unwrap();
    plan.advance().unwrap();
    assert!(matches!(plan.advance(), Err(Error::InvalidPlan { .. })));
    assert_eq!(plan.export_csr().positions, [i32::MAX, 2]);
    plan.retire(slot).unwrap();
    plan.advance().unwrap();
    assert_eq!(plan.export_csr().positions, [3]);
    let csr = plan.export_csr();
    plan.rebuild(csr.view(), Some(&[i32::MAX - 1])).unwrap();
    plan.advance().unwrap();
    assert_eq!(plan.export_csr().positions, [i32::MAX]);
    assert!(plan.advance().is_err());
}

#[test]
fn resident_arrays_stay_in_place_and_outlive_the_plan() {
    let mut plan = plan();
    let reader = plan.reader();
    let (lengths, len) = reader.array(PlanArray::Lengths);
    let slot = plan.admit(&[1], 2, 0, None).unwrap();
    plan.advance().unwrap();
    assert_eq!((reader.array(PlanArray::Lengths), len), ((lengths, 4), 4));
    drop(plan);
    // SAFETY: the reader keeps the array alive, and its writer is gone.
    assert_eq!(unsafe { *lengths.add(slot.index as usize) }, 3);
}

/// Readers never see a length without its pages or the pages of another state.
#[test]
fn readers_see_consistent_states_while_the_writer_works() {
    const ENOUGH: usize = 300;
    let mut plan = plan();
    let num_seen = Arc::new(AtomicUsize::new(0));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (reader, num_seen) = (plan.reader(), Arc::clone(&num_seen));
            std::thread::spawn(move || {
                while num_seen.load(Ordering::Acquire) < ENOUGH {
                    let csr = reader.snapshot().csr;
                    csr.view().validate(100, 4).unwrap();
                    for row in 0..csr.lengths.len() {
                        let pages = &csr.indices[csr.indptr[row] as usize..csr.indptr[row + 1] as usize];
                        // The writer gives a row only pages of one remainder.
                        assert!(pages.iter().all(|page| page % 4 == pages[0] % 4), "{pages:?}");
                        assert_eq!(csr.positions[row], csr.lengths[row]);
                    }
                    num_seen.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();
    let mut page = 0;
    while num_seen.load(Ordering::Acquire) < ENOUGH {
        page = (page + 1) % 4;
        let slot = plan.admit(&[page, page + 4], 7, 0, None).unwrap();
        plan.advance().unwrap();
        plan.append_page(slot, page + 8).unwrap();
        plan.advance().unwrap();
        plan.ensure_work_list();
        plan.retire(slot).unwrap();
    }
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}
