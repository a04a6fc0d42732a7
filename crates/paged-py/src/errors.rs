//! The Python exception tree, and the one conversion from `paged_core::Error`.
//!
//! Every class derives from `PagedError` and from the built-in that fits (`ValueError`, `TypeError`, `RuntimeError`). It
//! carries its stable `slug`; an instance also carries `hint` and the error's values as attributes. Several bases are out of
//! reach of `create_exception!` under the limited API, so the classes are made by calling `type`.

use paged_core::{Error, ErrorKind};
use pyo3::exceptions::{PyException, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

/// A core error on its way to Python: what every method of this crate returns.
#[derive(Debug)]
pub(crate) struct CoreError(pub(crate) Error);

/// Result of a method that can fail in the core.
pub(crate) type CoreResult<T> = Result<T, CoreError>;

impl From<Error> for CoreError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

struct Classes {
    base: Py<PyAny>,
    by_kind: Vec<(ErrorKind, Py<PyAny>)>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

enum Builtin {
    Value,
    Type,
    Runtime,
}

/// Name, built-in base and documentation of a kind's class.
fn class_of(kind: ErrorKind) -> (&'static str, Builtin, &'static str) {
    match kind {
        ErrorKind::OutOfPages => (
            "OutOfPagesError",
            Builtin::Runtime,
            "The pool has fewer free pages than asked for. Attributes: needed, free.",
        ),
        ErrorKind::BudgetTooSmall => (
            "BudgetTooSmallError",
            Builtin::Value,
            "The KV budget does not hold the workspace and one page. Attributes: total_bytes, workspace_bytes, page_bytes, \
             smallest_usable_bytes.",
        ),
        ErrorKind::BudgetExceeded => (
            "BudgetExceededError",
            Builtin::Runtime,
            "A reservation does not fit what is left of the budget. Attributes: needed, available, total.",
        ),
        ErrorKind::InvalidArgument => (
            "InvalidArgumentError",
            Builtin::Value,
            "An argument's value is out of its domain. Attribute: argument.",
        ),
        ErrorKind::InvalidType => (
            "InvalidTypeError",
            Builtin::Type,
            "An argument's type, dtype or layout cannot be used. Attribute: argument.",
        ),
        ErrorKind::PlanFull => (
            "PlanFullError",
            Builtin::Runtime,
            "A fixed capacity of a plan is used up. Attributes: what, needed, capacity.",
        ),
        ErrorKind::StaleSlot => (
            "StaleSlotError",
            Builtin::Runtime,
            "A slot was retired since the caller got it. Attributes: index, expected, found (generations).",
        ),
        ErrorKind::InvalidPlan => {
            ("InvalidPlanError", Builtin::Value, "A plan or CSR description breaks an invariant.")
        }
        ErrorKind::Corrupt => (
            "CorruptionError",
            Builtin::Runtime,
            "Page accounting is broken: a double release, a retain of a free page, or a failed integrity check.",
        ),
        ErrorKind::AllocationFailed => (
            "AllocationError",
            Builtin::Runtime,
            "The operating system refused the memory. Attribute: bytes.",
        ),
        _ => ("UnknownCoreError", Builtin::Runtime, "An error of the core without a class of its own."),
    }
}

/// Makes the classes and adds them to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = CLASSES.get_or_try_init(py, || make_classes(module))?;
    module.add("PagedError", &classes.base)?;
    for (kind, class) in &classes.by_kind {
        module.add(class_of(*kind).0, class)?;
    }
    Ok(())
}

fn make_classes(module: &Bound<'_, PyModule>) -> PyResult<Classes> {
    let py = module.py();
    let make = |name: &str, bases: Bound<'_, PyTuple>, slug: &str, doc: &str| -> PyResult<Py<PyAny>> {
        let members = PyDict::new(py);
        members.set_item("__module__", module.name()?)?;
        members.set_item("__doc__", doc)?;
        members.set_item("slug", slug)?;
        members.set_item("hint", py.None())?;
        Ok(py.get_type::<PyType>().call1((name, bases, members))?.unbind())
    };
    let exception = PyTuple::new(py, [py.get_type::<PyException>()])?;
    let doc = "Base of every error that this package raises on purpose. Attributes: slug (stable name), hint (what to do, or None).";
    let base = make("PagedError", exception, "paged_error", doc)?;
    let by_kind = ErrorKind::ALL.into_iter().map(|kind| {
        let (name, builtin, doc) = class_of(kind);
        let builtin = match builtin {
            Builtin::Value => py.get_type::<PyValueError>(),
            Builtin::Type => py.get_type::<PyTypeError>(),
            Builtin::Runtime => py.get_type::<PyRuntimeError>(),
        };
        let bases = PyTuple::new(py, [base.bind(py).clone(), builtin.into_any()])?;
        Ok((kind, make(name, bases, kind.slug(), doc)?))
    });
    let by_kind = by_kind.collect::<PyResult<Vec<_>>>()?;
    Ok(Classes { base, by_kind })
}

impl From<CoreError> for PyErr {
    fn from(CoreError(error): CoreError) -> Self {
        Python::attach(|py| make_exception(py, &error).map_or_else(|failure| failure, PyErr::from_value))
    }
}

fn make_exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class =
        CLASSES.get(py).and_then(|classes| classes.by_kind.iter().find(|(kind, _)| *kind == error.kind()));
    let Some((_, class)) = class else { return Err(PyRuntimeError::new_err(error.to_string())) };
    let message = match error.hint() {
        Some(hint) => format!("{error} (hint: {hint})"),
        None => error.to_string(),
    };
    let exception = class.bind(py).call1((message,))?;
    exception.setattr("hint", error.hint())?;
    set_values(&exception, error)?;
    Ok(exception)
}

fn set_values(exception: &Bound<'_, PyAny>, error: &Error) -> PyResult<()> {
    match error {
        Error::OutOfPages { needed, free } => {
            exception.setattr("needed", needed)?;
            exception.setattr("free", free)
        }
        Error::BudgetTooSmall { total_bytes, workspace_bytes, page_bytes, smallest_usable_bytes } => {
            exception.setattr("total_bytes", total_bytes)?;
            exception.setattr("workspace_bytes", workspace_bytes)?;
            exception.setattr("page_bytes", page_bytes)?;
            exception.setattr("smallest_usable_bytes", smallest_usable_bytes)
        }
        Error::BudgetExceeded { needed, available, total } => {
            exception.setattr("needed", needed)?;
            exception.setattr("available", available)?;
            exception.setattr("total", total)
        }
        Error::InvalidArgument { argument, .. } | Error::InvalidType { argument, .. } => {
            exception.setattr("argument", argument)
        }
        Error::PlanFull { what, needed, capacity } => {
            exception.setattr("what", what)?;
            exception.setattr("needed", needed)?;
            exception.setattr("capacity", capacity)
        }
        Error::StaleSlot { index, expected, found } => {
            exception.setattr("index", index)?;
            exception.setattr("expected", expected)?;
            exception.setattr("found", found)
        }
        Error::AllocationFailed { bytes } => exception.setattr("bytes", bytes),
        _ => Ok(()),
    }
}
