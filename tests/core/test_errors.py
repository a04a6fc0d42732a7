"""The exception tree: every class has its bases, its slug, its values, and a test that raises it."""

import pickle
from collections.abc import Callable

import pytest

from mlxcel_paged import _core
from mlxcel_paged._core import BlockBudget, DecodePlan, PagedError, PagePool


def plan() -> DecodePlan:
    return DecodePlan(
        max_slots=1, max_pages_per_slot=1, num_pages=4, page_size=4, num_qo_heads=1, num_kv_heads=1, head_dim=8
    )


def stale() -> None:
    owner = plan()
    slot = owner.admit([], 0)
    owner.retire(slot)
    owner.retire(slot)


def no_page() -> None:
    owner = plan()
    owner.admit([], 0)
    owner.advance()


RAISES: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "OutOfPagesError": (RuntimeError, "out_of_pages", lambda: PagePool(1).acquire(2)),
    "BudgetTooSmallError": (ValueError, "budget_too_small", lambda: BlockBudget(0, workspace_bytes=1, page_bytes=1)),
    "BudgetExceededError": (
        RuntimeError,
        "budget_exceeded",
        lambda: BlockBudget(2, workspace_bytes=1, page_bytes=1).reserve(2),
    ),
    "InvalidArgumentError": (ValueError, "invalid_argument", lambda: PagePool(0)),
    "InvalidTypeError": (TypeError, "invalid_type", lambda: PagePool("1")),  # type: ignore[arg-type]
    "PlanFullError": (RuntimeError, "plan_full", lambda: plan().admit([1, 2], 8)),
    "StaleSlotError": (RuntimeError, "stale_slot", stale),
    "InvalidPlanError": (ValueError, "invalid_plan", no_page),
    "CorruptionError": (RuntimeError, "corrupt", lambda: PagePool(1).release([0])),
}

# Needs a machine that refuses memory.
NOT_RAISED = {"AllocationError": (RuntimeError, "allocation_failed")}


def classes() -> dict[str, type[PagedError]]:
    found = {name: value for name, value in vars(_core).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if issubclass(value, PagedError) and value is not PagedError}


def test_every_class_is_covered() -> None:
    assert classes().keys() == RAISES.keys() | NOT_RAISED.keys()
    slugs = [value.slug for value in classes().values()]
    assert len(set(slugs)) == len(slugs)


@pytest.mark.parametrize("name", RAISES)
def test_an_error_has_its_bases_slug_message_and_hint(name: str) -> None:
    builtin, slug, trigger = RAISES[name]
    with pytest.raises(PagedError) as caught:
        trigger()
    error = caught.value
    assert type(error) is getattr(_core, name)
    assert isinstance(error, builtin)
    assert error.slug == slug
    assert error.__class__.__module__ == "mlxcel_paged._core"
    assert error.__doc__
    assert str(error)
    if error.hint is not None:
        assert error.hint in str(error)


def test_errors_can_cross_processes() -> None:
    with pytest.raises(PagedError) as caught:
        PagePool(1).acquire(2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.needed) == (type(caught.value), str(caught.value), 2)


@pytest.mark.parametrize("name", NOT_RAISED)
def test_rare_errors_have_their_bases_and_slug(name: str) -> None:
    builtin, slug = NOT_RAISED[name]
    assert issubclass(getattr(_core, name), builtin)
    assert getattr(_core, name).slug == slug
