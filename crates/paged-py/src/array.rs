//! Float arrays across the border: NumPy and MLX arrays, borrowed through the buffer protocol for one call.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use paged_core::Error;
use paged_core::attention::{Array, ElementType};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::CoreResult;

/// A held buffer. Dropped with the interpreter attached, after the kernel has returned.
pub(crate) struct ArrayArgument {
    name: &'static str,
    view: ffi::Py_buffer,
    element: ElementType,
}

impl ArrayArgument {
    /// Borrows `value`, an array of f32, f16 or bfloat16 elements. bfloat16 comes as MLX exports it (format "bfloat16")
    /// or carried by uint16, as NumPy has no such type.
    pub fn new(name: &'static str, value: &Bound<'_, PyAny>) -> CoreResult<Self> {
        let mut view = MaybeUninit::<ffi::Py_buffer>::zeroed();
        // SAFETY: `value` is a live object, and the call fills the view or fails.
        if unsafe { ffi::PyObject_GetBuffer(value.as_ptr(), view.as_mut_ptr(), ffi::PyBUF_RECORDS_RO) } != 0 {
            let cause = PyErr::fetch(value.py());
            let found = value.get_type();
            return Err(Error::invalid_type(name, format!("expected an array, got {found}: {cause}")).into());
        }
        // SAFETY: filled by the call.
        let view = unsafe { view.assume_init() };
        let mut argument = Self { name, view, element: ElementType::F32 };
        argument.element = argument.read_element()?;
        Ok(argument)
    }

    /// As [`Self::new`]; `None` stays `None`.
    pub fn optional(name: &'static str, value: Option<&Bound<'_, PyAny>>) -> CoreResult<Option<Self>> {
        value.map(|value| Self::new(name, value)).transpose()
    }

    fn read_element(&self) -> CoreResult<ElementType> {
        // SAFETY: a format, if there is one, is a string that lives as long as the view.
        let format = (!self.view.format.is_null()).then(|| unsafe { CStr::from_ptr(self.view.format) });
        let format = format.map_or("B", |format| format.to_str().unwrap_or("?"));
        let native = if cfg!(target_endian = "little") { ['@', '=', '<'] } else { ['@', '=', '>'] };
        let element = match (format.strip_prefix(native).unwrap_or(format), self.view.itemsize) {
            ("f", 4) => ElementType::F32,
            ("e", 2) => ElementType::F16,
            ("bfloat16" | "H", 2) => ElementType::Bf16,
            _ => {
                let message = format!(
                    "elements of format {format:?}, expected float32, float16 or bfloat16 (as such or carried by uint16)"
                );
                return Err(Error::invalid_type(self.name, message).into());
            }
        };
        if !self.view.suboffsets.is_null() {
            return Err(Error::invalid_type(self.name, "an array of pointers to its rows").into());
        }
        Ok(element)
    }

    /// The array, with `N` dimensions.
    pub fn array<const N: usize>(&self) -> CoreResult<Array<'_, N>> {
        let num_dimensions = self.view.ndim;
        if num_dimensions as usize != N {
            return Err(
                Error::invalid(self.name, format!("{num_dimensions} dimensions, expected {N}")).into()
            );
        }
        let size = self.element.size_bytes() as isize;
        let mut shape = [0; N];
        let mut strides = [0; N];
        for i in 0..N {
            // SAFETY: requested with strides, so both arrays have `ndim` entries; an exporter may leave them out at 0
            // dimensions only.
            let (extent, stride) = unsafe { (*self.view.shape.add(i), *self.view.strides.add(i)) };
            shape[i] = extent as usize;
            strides[i] = stride / size;
            if stride % size != 0 && extent > 1 {
                let message = format!("a stride of {stride} bytes, expected a multiple of {size}");
                return Err(Error::invalid(self.name, message).into());
            }
        }
        let is_writable = self.view.readonly == 0;
        // SAFETY: the exporter keeps the memory for as long as the view is held, which outlives the array. That nobody
        // else writes meanwhile is what a caller of the kernels promises, as for any in-place operation on its arrays.
        let array = unsafe {
            Array::from_raw(self.name, self.view.buf.cast(), self.element, shape, strides, is_writable)
        };
        Ok(array?)
    }
}

impl Drop for ArrayArgument {
    fn drop(&mut self) {
        // SAFETY: filled by `PyObject_GetBuffer` and released once; values of this type live inside calls, attached.
        unsafe { ffi::PyBuffer_Release(&raw mut self.view) }
    }
}
