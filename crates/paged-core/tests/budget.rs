//! Behaviour of the block budget at its borders.

use paged_core::{BlockBudget, Error};

const WORKSPACE: u64 = 1000;
const PAGE: u64 = 64;

#[test]
fn a_budget_without_a_page_names_the_smallest_usable_one() {
    for total_bytes in [0, 1, WORKSPACE - 1, WORKSPACE, WORKSPACE + 1, WORKSPACE + PAGE - 1] {
        let error = BlockBudget::new(total_bytes, WORKSPACE, PAGE).err().unwrap();
        let expected = Error::BudgetTooSmall {
            total_bytes,
            workspace_bytes: WORKSPACE,
            page_bytes: PAGE,
            smallest_usable_bytes: WORKSPACE + PAGE,
        };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("1064"), "{error}");
    }
}

#[test]
fn the_smallest_usable_budget_is_usable() {
    let budget = BlockBudget::new(WORKSPACE + PAGE, WORKSPACE, PAGE).unwrap();
    assert_eq!((budget.num_pages(), budget.num_available(), budget.num_reserved()), (1, 1, 0));
    assert_eq!(BlockBudget::new(WORKSPACE + 2 * PAGE - 1, WORKSPACE, PAGE).unwrap().num_pages(), 1);
    assert_eq!(BlockBudget::new(WORKSPACE + 2 * PAGE, WORKSPACE, PAGE).unwrap().num_pages(), 2);
    assert_eq!(BlockBudget::new(u64::MAX, 0, 1).unwrap().num_pages(), u64::MAX);
}

#[test]
fn sizes_that_overflow_are_refused() {
    assert!(matches!(BlockBudget::new(10, 0, 0), Err(Error::InvalidArgument { argument: "page_bytes", .. })));
    let result = BlockBudget::new(u64::MAX, u64::MAX, 1);
    assert!(matches!(result, Err(Error::InvalidArgument { argument: "workspace_bytes", .. })));
}

#[test]
fn reservations_come_back_once() {
    let budget = BlockBudget::new(10, 0, 1).unwrap();
    let mut first = budget.reserve(6).unwrap();
    let second = budget.reserve(4).unwrap();
    let full = Error::BudgetExceeded { needed: 1, available: 0, total: 10 };
    assert_eq!(budget.reserve(1).err(), Some(full));
    assert!(budget.reserve(0).is_ok());
    first.release();
    first.release();
    assert_eq!((first.num_pages(), budget.num_reserved()), (0, 4));
    drop((first, second));
    assert_eq!(budget.num_available(), 10);
}

#[test]
fn a_failed_reservation_reserves_nothing() {
    let budget = BlockBudget::new(u64::MAX, 0, 1).unwrap();
    let held = budget.reserve(u64::MAX - 1).unwrap();
    for needed in [2, u64::MAX] {
        let expected = Error::BudgetExceeded { needed, available: 1, total: u64::MAX };
        assert_eq!(budget.reserve(needed).err(), Some(expected));
    }
    assert_eq!(budget.num_reserved(), held.num_pages());
}
