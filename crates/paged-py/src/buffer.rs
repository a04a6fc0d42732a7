//! Arrays and counts across the border: index arguments in, read-only i32 views out.

use std::ffi::{c_int, c_void};
use std::ptr;

use paged_core::plan::{PlanArray, PlanReader};
use paged_core::{Error, PageId};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyOverflowError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyMemoryView};

use crate::errors::{CoreError, CoreResult};

/// Reads a count or an index that must not be negative.
pub(crate) fn count(argument: &'static str, value: &Bound<'_, PyAny>) -> CoreResult<usize> {
    if value.is_exact_instance_of::<PyBool>() {
        return Err(Error::invalid_type(argument, "expected an int, got bool").into());
    }
    let number = match value.extract::<i64>() {
        Ok(number) => number,
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            return Err(Error::invalid(argument, "the number exceeds 64 bits").into());
        }
        Err(_) => {
            return Err(
                Error::invalid_type(argument, format!("expected an int, got {}", type_name(value))).into()
            );
        }
    };
    usize::try_from(number)
        .map_err(|_| Error::invalid(argument, format!("expected 0 or more, got {number}")).into())
}

/// As [`count`]; `None` stays `None`.
pub(crate) fn optional_count(
    argument: &'static str,
    value: Option<&Bound<'_, PyAny>>,
) -> CoreResult<Option<usize>> {
    value.map(|value| count(argument, value)).transpose()
}

/// Reads a one-dimensional index array: any int32 or int64 buffer, strided or not, or a sequence of ints.
pub(crate) fn int32_array(argument: &'static str, value: &Bound<'_, PyAny>) -> CoreResult<Vec<i32>> {
    let py = value.py();
    let narrow = |wide: i64| {
        i32::try_from(wide)
            .map_err(|_| CoreError(Error::invalid(argument, format!("{wide} does not fit an int32"))))
    };
    // SAFETY: `value` is a live object and the call only reads its type.
    if unsafe { ffi::PyObject_CheckBuffer(value.as_ptr()) } == 1 {
        // A memoryview has strides also where the exporter leaves them out, as ctypes does.
        let view = PyMemoryView::from(value).map_err(|error| wrong_type(argument, error))?;
        let buffer = PyUntypedBuffer::get(&view).map_err(|error| wrong_type(argument, error))?;
        return read_buffer(argument, &buffer)?.into_iter().map(narrow).collect();
    }
    let items = value.try_iter().map_err(|error| wrong_type(argument, error))?;
    items
        .map(|item| {
            let item = item.map_err(|error| wrong_type(argument, error))?;
            match item.extract::<i64>() {
                Ok(number) => narrow(number),
                Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                    Err(Error::invalid(argument, "an element exceeds 64 bits").into())
                }
                Err(_) => {
                    Err(Error::invalid_type(argument, format!("expected ints, got {}", type_name(&item)))
                        .into())
                }
            }
        })
        .collect()
}

/// Reads page ids. Whether they are in the pool is the core's question.
pub(crate) fn page_ids(argument: &'static str, value: &Bound<'_, PyAny>) -> CoreResult<Vec<PageId>> {
    let pages = int32_array(argument, value)?;
    let to_id = |page: i32| {
        PageId::try_from(page).map_err(|_| {
            CoreError(Error::invalid(argument, format!("expected page ids of 0 or more, got {page}")))
        })
    };
    pages.into_iter().map(to_id).collect()
}

/// Copies the integers of a buffer. Not by way of `PyBuffer<i32>`: pyo3 0.30 takes big-endian elements for native ones on
/// little-endian machines, and refuses the little-endian ones that ctypes exports.
fn read_buffer(argument: &'static str, buffer: &PyUntypedBuffer) -> CoreResult<Vec<i64>> {
    if buffer.dimensions() != 1 {
        return Err(Error::invalid_type(
            argument,
            format!("expected 1 dimension, got {}", buffer.dimensions()),
        )
        .into());
    }
    let format = buffer.format().to_str().unwrap_or("?");
    let native = if cfg!(target_endian = "little") { ['@', '=', '<'] } else { ['@', '=', '>'] };
    let is_wide = match (format.strip_prefix(native).unwrap_or(format), buffer.item_size()) {
        ("i" | "l", 4) => false,
        ("i" | "l" | "q", 8) => true,
        _ => {
            let message =
                format!("expected int32 or int64 elements in native byte order, got format {format:?}");
            return Err(Error::invalid_type(argument, message).into());
        }
    };
    let read = |index: usize| {
        let element = buffer.get_ptr(&[index]);
        // SAFETY: the index is below the buffer's shape, the element has the width that its format says (checked), and the
        // exporter keeps it in place while `buffer` lives; no alignment is assumed.
        unsafe {
            if is_wide {
                element.cast::<i64>().read_unaligned()
            } else {
                i64::from(element.cast::<i32>().read_unaligned())
            }
        }
    };
    Ok((0..buffer.shape()[0]).map(read).collect())
}

fn wrong_type(argument: &'static str, error: PyErr) -> CoreError {
    CoreError(Error::invalid_type(argument, error.to_string()))
}

pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string())
}

/// Where a view's entries live.
enum Storage {
    /// A copy that the view owns.
    Owned(Vec<i32>),
    /// The resident array of a plan, kept alive by the reader.
    Resident(PlanReader, PlanArray),
}

/// Exporter of read-only int32 arrays of one or two dimensions.
#[pyclass(frozen)]
pub(crate) struct Int32Array {
    storage: Storage,
    shape: [ffi::Py_ssize_t; 2],
    strides: [ffi::Py_ssize_t; 2],
    num_dimensions: c_int,
}

impl Int32Array {
    /// A view of `values`, `[n]`, or `[n / columns, columns]` if `columns` is given.
    pub(crate) fn owned(
        py: Python<'_>,
        values: Vec<i32>,
        columns: Option<usize>,
    ) -> PyResult<Bound<'_, PyMemoryView>> {
        let len = values.len();
        Self::view(py, Storage::Owned(values), len, columns)
    }

    /// A view of a resident array, as it changes.
    pub(crate) fn resident(
        py: Python<'_>,
        reader: PlanReader,
        array: PlanArray,
        columns: Option<usize>,
    ) -> PyResult<Bound<'_, PyMemoryView>> {
        let len = reader.array(array).1;
        Self::view(py, Storage::Resident(reader, array), len, columns)
    }

    fn view(
        py: Python<'_>,
        storage: Storage,
        len: usize,
        columns: Option<usize>,
    ) -> PyResult<Bound<'_, PyMemoryView>> {
        const ITEM: usize = size_of::<i32>();
        let inner = columns.unwrap_or(1);
        let exporter = Self {
            storage,
            shape: [(len / inner) as ffi::Py_ssize_t, inner as ffi::Py_ssize_t],
            strides: [(inner * ITEM) as ffi::Py_ssize_t, ITEM as ffi::Py_ssize_t],
            num_dimensions: if columns.is_some() { 2 } else { 1 },
        };
        PyMemoryView::from(Bound::new(py, exporter)?.as_any())
    }

    fn entries(&self) -> (*const i32, usize) {
        match &self.storage {
            Storage::Owned(values) => (values.as_ptr(), values.len()),
            Storage::Resident(reader, array) => reader.array(*array),
        }
    }
}

#[pymethods]
impl Int32Array {
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no buffer to fill"));
        }
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("the array is read-only"));
        }
        let array = slf.get();
        let (entries, len) = array.entries();
        let shape = array.shape.as_ptr().cast_mut();
        let strides = array.strides.as_ptr().cast_mut();
        // SAFETY: the interpreter passes a `Py_buffer` to fill (not null, checked). The entries, shape and strides live in `slf`
        // or in what it owns, do not move while it lives, and `view.obj` keeps it alive. Consumers get them as read-only.
        unsafe {
            (*view).buf = entries.cast::<c_void>().cast_mut();
            (*view).len = (len * size_of::<i32>()) as ffi::Py_ssize_t;
            (*view).readonly = 1;
            (*view).itemsize = size_of::<i32>() as ffi::Py_ssize_t;
            (*view).format = if flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT {
                c"i".as_ptr().cast_mut()
            } else {
                ptr::null_mut()
            };
            (*view).ndim = array.num_dimensions;
            (*view).shape = if flags & ffi::PyBUF_ND == ffi::PyBUF_ND { shape } else { ptr::null_mut() };
            (*view).strides =
                if flags & ffi::PyBUF_STRIDES == ffi::PyBUF_STRIDES { strides } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }
}
