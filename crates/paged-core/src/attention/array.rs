//! Borrowed n-dimensional arrays: a pointer, a shape and strides, checked when made.

use std::marker::PhantomData;

use super::element::{Element, ElementType};
use crate::error::{Error, Result};

/// An array of `N` dimensions in memory that somebody else owns, named as the argument that it is.
///
/// Strides count elements and may be negative or zero; elements may be unaligned.
#[derive(Debug)]
pub struct Array<'a, const N: usize> {
    name: &'static str,
    data: *mut u8,
    element: ElementType,
    shape: [usize; N],
    strides: [isize; N],
    writable: bool,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: the memory is borrowed for 'a, and all access through an array happens inside one launch at a time.
unsafe impl<const N: usize> Send for Array<'_, N> {}
// SAFETY: as above; shared references only read the description.
unsafe impl<const N: usize> Sync for Array<'_, N> {}

impl<'a, const N: usize> Array<'a, N> {
    /// A read-only array over a slice, row-major unless `strides` (in elements) are given.
    ///
    /// # Errors
    /// `InvalidArgument` if an element would lie outside the slice.
    pub fn from_slice<T: Element>(
        name: &'static str,
        data: &'a [T],
        shape: [usize; N],
        strides: Option<[isize; N]>,
    ) -> Result<Self> {
        Self::over_slice(name, data.as_ptr().cast_mut(), data.len(), shape, strides, false)
    }

    /// A writable array over a slice, row-major unless `strides` (in elements) are given.
    ///
    /// # Errors
    /// `InvalidArgument` if an element would lie outside the slice.
    pub fn from_slice_mut<T: Element>(
        name: &'static str,
        data: &'a mut [T],
        shape: [usize; N],
        strides: Option<[isize; N]>,
    ) -> Result<Self> {
        Self::over_slice(name, data.as_mut_ptr(), data.len(), shape, strides, true)
    }

    /// An array over raw memory.
    ///
    /// # Safety
    /// For `'a`, every element that `shape` and `strides` (in elements) reach from `data` is readable, and writable if
    /// `writable`. Nobody writes the elements meanwhile and, if `writable`, nobody else reads them.
    ///
    /// # Errors
    /// `InvalidArgument` if the extent does not fit the address space.
    pub unsafe fn from_raw(
        name: &'static str,
        data: *mut u8,
        element: ElementType,
        shape: [usize; N],
        strides: [isize; N],
        writable: bool,
    ) -> Result<Self> {
        let array = Self { name, data, element, shape, strides, writable, memory: PhantomData };
        if array.element_range().is_none() {
            return Err(array
                .invalid(format!("shape {shape:?} with strides {strides:?} overflows the address space")));
        }
        Ok(array)
    }

    fn over_slice<T: Element>(
        name: &'static str,
        data: *mut T,
        len: usize,
        shape: [usize; N],
        strides: Option<[isize; N]>,
        writable: bool,
    ) -> Result<Self> {
        let strides = match strides {
            Some(strides) => strides,
            None => row_major(shape).ok_or_else(|| {
                Error::invalid(name, format!("shape {shape:?} overflows the address space"))
            })?,
        };
        // SAFETY: the elements are checked against the slice before the array is handed out.
        let array = unsafe { Self::from_raw(name, data.cast(), T::TYPE, shape, strides, writable) }?;
        match array.element_range() {
            Some((low, high)) if low >= 0 && high as usize <= len => Ok(array),
            _ => Err(array.invalid(format!(
                "shape {shape:?} with strides {strides:?} reaches outside its {len} elements"
            ))),
        }
    }

    /// The argument's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.element
    }

    /// Extent of each dimension.
    pub fn shape(&self) -> [usize; N] {
        self.shape
    }

    /// Distance between neighbours along each dimension, in elements.
    pub fn strides(&self) -> [isize; N] {
        self.strides
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    /// Distance between neighbours along a dimension, in bytes.
    pub(crate) fn stride_bytes(&self, dimension: usize) -> isize {
        self.strides[dimension] * self.element.size_bytes() as isize
    }

    pub(crate) fn invalid(&self, message: impl Into<String>) -> Error {
        Error::invalid(self.name, message)
    }

    pub(crate) fn expect_element(&self, expected: ElementType, meaning: &str) -> Result<()> {
        if self.element == expected {
            return Ok(());
        }
        let (found, expected) = (self.element.name(), expected.name());
        Err(Error::invalid_type(self.name, format!("{found}, expected {meaning}, {expected}")))
    }

    pub(crate) fn expect_shape(&self, expected: [usize; N], meaning: &str) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.invalid(format!("shape {:?}, expected {meaning} = {expected:?}", self.shape)))
    }

    pub(crate) fn expect_contiguous_rows(&self) -> Result<()> {
        if self.shape[N - 1] > 1 && self.strides[N - 1] != 1 {
            return Err(
                self.invalid(format!("last dimension has stride {}, expected 1", self.strides[N - 1]))
            );
        }
        Ok(())
    }

    /// Writable, and no two indices share an element.
    pub(crate) fn expect_writable(&self) -> Result<()> {
        if !self.writable {
            return Err(self.invalid("read-only memory, a writable array is needed"));
        }
        let mut dimensions: Vec<(usize, usize)> = self
            .shape
            .iter()
            .zip(self.strides)
            .filter(|(n, _)| **n > 1)
            .map(|(n, s)| (s.unsigned_abs(), *n))
            .collect();
        dimensions.sort_unstable();
        let mut extent = 1;
        for (stride, n) in dimensions {
            if stride < extent {
                return Err(self.invalid(format!("strides {:?} make its own elements overlap", self.strides)));
            }
            extent += (n - 1) * stride;
        }
        Ok(())
    }

    /// The memory from the first to the last element meets that of `other` nowhere.
    pub(crate) fn expect_apart<const M: usize>(&self, other: &Array<'_, M>) -> Result<()> {
        let ((a_low, a_high), (b_low, b_high)) = (self.addresses(), other.addresses());
        if a_low < b_high && b_low < a_high {
            return Err(self.invalid(format!("overlaps the memory of {}", other.name)));
        }
        Ok(())
    }

    /// No element is one of `other`, an array of the same shape. Interleaved views of one buffer pass; views whose strides
    /// differ must not even meet.
    pub(crate) fn expect_distinct(&self, other: &Self) -> Result<()> {
        if self.expect_apart(other).is_ok() {
            return Ok(());
        }
        let distance = other.data.addr().wrapping_sub(self.data.addr()) as isize;
        let size = self.element.size_bytes() as isize;
        let mut steps: Vec<(isize, isize)> = self
            .shape
            .iter()
            .zip(self.strides)
            .filter(|(n, _)| **n > 1)
            .map(|(n, stride)| ((stride * size).abs(), *n as isize - 1))
            .collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        let strides = self.strides.iter().zip(other.strides);
        // Of a dimension of size one it says nothing.
        let is_unlike = strides.zip(self.shape).any(|((mine, theirs), n)| n > 1 && *mine != theirs);
        let overlaps = is_unlike || distance % size != 0 || is_reachable(distance, &steps);
        if overlaps { self.expect_apart(other) } else { Ok(()) }
    }

    fn addresses(&self) -> (usize, usize) {
        let (low, high) = self.element_range().unwrap_or((0, 0));
        let size = self.element.size_bytes() as isize;
        let address = |offset: isize| self.data.addr().wrapping_add_signed(offset * size);
        (address(low), address(high))
    }

    /// Half-open range of element offsets from `data`; `None` if it does not fit.
    fn element_range(&self) -> Option<(isize, isize)> {
        if self.shape.contains(&0) {
            return Some((0, 0));
        }
        let (mut low, mut high) = (0_isize, 1_isize);
        for (n, stride) in self.shape.iter().zip(self.strides) {
            let reach = stride.checked_mul(isize::try_from(n - 1).ok()?)?;
            if reach < 0 {
                low = low.checked_add(reach)?;
            } else {
                high = high.checked_add(reach)?;
            }
        }
        let size = self.element.size_bytes() as isize;
        low.checked_mul(size)?;
        high.checked_mul(size)?;
        Some((low, high))
    }
}

fn row_major<const N: usize>(shape: [usize; N]) -> Option<[isize; N]> {
    let mut strides = [0; N];
    let mut stride = 1_isize;
    for i in (0..N).rev() {
        strides[i] = stride;
        stride = stride.checked_mul(isize::try_from(shape[i]).ok()?.max(1))?;
    }
    Some(strides)
}

/// Whether `distance` is a sum of multiples of the steps, each at most its count either way. Steps are sorted, longest first, and
/// each is longer than all behind it together, so only the two multiples next to the distance can work.
fn is_reachable(distance: isize, steps: &[(isize, isize)]) -> bool {
    let Some((&(step, count), rest)) = steps.split_first() else {
        return distance == 0;
    };
    let below = distance.div_euclid(step);
    [below, below + 1]
        .into_iter()
        .filter(|multiple| multiple.abs() <= count)
        .any(|multiple| is_reachable(distance - multiple * step, rest))
}
