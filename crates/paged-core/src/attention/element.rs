//! Element types of arrays and their conversion to and from f32 vectors.

use half::{bf16, f16};

use super::simd::Simd;

/// Element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
}

impl ElementType {
    /// Bytes of an element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name that array libraries use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A Rust type of array elements: `f32`, `half::f16` or `half::bf16`.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// Its run-time name.
    const TYPE: ElementType;
}

/// Elements that convert to vectors of f32.
pub(crate) trait VectorElement: Element {
    /// # Safety
    /// `S::LANES` elements are readable at `p`, aligned or not.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
}

macro_rules! vector_element {
    ($type:ty, $name:ident, $load:ident) => {
        impl Element for $type {
            const TYPE: ElementType = ElementType::$name;
        }

        impl VectorElement for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { s.$load(p.cast()) }
            }
        }
    };
}

vector_element!(f32, F32, load_f32);
vector_element!(f16, F16, load_f16);
vector_element!(bf16, Bf16, load_bf16);

/// Loads a vector of elements whose type is known at run time only.
///
/// # Safety
/// `S::LANES` elements of type `element` are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn load_any<S: Simd>(s: S, element: ElementType, p: *const u8) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            ElementType::F32 => s.load_f32(p.cast()),
            ElementType::F16 => s.load_f16(p.cast()),
            ElementType::Bf16 => s.load_bf16(p.cast()),
        }
    }
}

/// Stores a vector as elements whose type is known at run time only.
///
/// # Safety
/// `S::LANES` elements of type `element` are writable at `p`.
#[inline(always)]
pub(crate) unsafe fn store_any<S: Simd>(s: S, element: ElementType, p: *mut u8, x: S::V) {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            ElementType::F32 => s.store_f32(p.cast(), x),
            ElementType::F16 => s.store_f16(p.cast(), x),
            ElementType::Bf16 => s.store_bf16(p.cast(), x),
        }
    }
}

/// One element as f32.
///
/// # Safety
/// An element of type `element` is readable at `p`.
#[inline(always)]
pub(crate) unsafe fn read_scalar(element: ElementType, p: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            ElementType::F32 => p.cast::<f32>().read_unaligned(),
            ElementType::F16 => p.cast::<f16>().read_unaligned().to_f32(),
            ElementType::Bf16 => p.cast::<bf16>().read_unaligned().to_f32(),
        }
    }
}
