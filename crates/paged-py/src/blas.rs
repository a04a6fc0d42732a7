//! An optimised BLAS under MLX's CPU backend.
//!
//! The Linux wheel of MLX links a reference BLAS, but looks `cblas_?gemm` up in the process's global scope first. PyPI's
//! `scipy-openblas32` holds OpenBLAS under prefixed names that clash with nothing. This module exports the three plain names
//! that MLX imports and forwards them. An extension module is loaded into a scope of its own, so the names mean nothing to
//! anybody until `mlxcel_paged.blas.prepare()` promotes this library to the global scope, after `install_blas`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use paged_core::Error;
use pyo3::prelude::*;

use crate::errors::CoreResult;

const RTLD_NOW: c_int = 2;
#[repr(C)]
struct SymbolInfo {
    file_name: *const c_char,
    file_base: *mut c_void,
    symbol_name: *const c_char,
    symbol_address: *mut c_void,
}

unsafe extern "C" {
    fn dlopen(file_name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
    fn dladdr(address: *const c_void, info: *mut SymbolInfo) -> c_int;
}

/// A function that the trampolines forward to.
struct Target {
    name: &'static CStr,
    prefixed_name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Target {
    const fn new(name: &'static CStr, prefixed_name: &'static CStr) -> Self {
        Self { name, prefixed_name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    fn address(&self) -> *mut c_void {
        count_call();
        // Acquire pairs with the Release store in `install_blas` or below.
        let address = self.address.load(Ordering::Acquire);
        if address.is_null() { self.next() } else { address }
    }

    /// Another library's function of the same name: this one can be in the global scope without `install_blas` if the process
    /// loads all extension modules globally (`sys.setdlopenflags`).
    #[cold]
    fn next(&self) -> *mut c_void {
        let own = library_of((self as *const Self).cast());
        let found = loaded_libraries().into_iter().find_map(|file_name| {
            // SAFETY: a library that is loaded, which stays so, and strings.
            let address = unsafe { dlsym(dlopen(file_name.as_ptr(), RTLD_NOW), self.name.as_ptr()) };
            (!address.is_null() && library_of(address) != own).then_some(address)
        });
        let Some(address) = found else {
            eprintln!(
                "mlxcel_paged: no library provides {}; call mlxcel_paged.blas.prepare() first",
                self.name.to_string_lossy()
            );
            std::process::abort();
        };
        self.address.store(address, Ordering::Release);
        address
    }
}

/// File of the library that an address is in.
fn library_of(address: *const c_void) -> Option<CString> {
    let mut info = MaybeUninit::<SymbolInfo>::zeroed();
    // SAFETY: the info is filled if the call succeeds; its file name lives as long as the library.
    unsafe {
        if dladdr(address, info.as_mut_ptr()) == 0 || info.assume_init_ref().file_name.is_null() {
            return None;
        }
        Some(CStr::from_ptr(info.assume_init_ref().file_name).to_owned())
    }
}

#[cfg(target_os = "linux")]
fn loaded_libraries() -> Vec<CString> {
    /// The head of `dl_phdr_info`.
    #[repr(C)]
    struct LoadedObject {
        base: usize,
        file_name: *const c_char,
    }
    unsafe extern "C" {
        fn dl_iterate_phdr(
            callback: unsafe extern "C" fn(*const LoadedObject, usize, *mut c_void) -> c_int,
            data: *mut c_void,
        ) -> c_int;
    }
    unsafe extern "C" fn collect(object: *const LoadedObject, _size: usize, names: *mut c_void) -> c_int {
        // SAFETY: called below only, with a live object and the vector; a name is a string.
        unsafe {
            let file_name = CStr::from_ptr((*object).file_name);
            if !file_name.is_empty() {
                (*names.cast::<Vec<CString>>()).push(file_name.to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the callback gets the vector, which outlives the call.
    unsafe { dl_iterate_phdr(collect, (&raw mut names).cast()) };
    names
}

#[cfg(not(target_os = "linux"))]
fn loaded_libraries() -> Vec<CString> {
    Vec::new()
}

static SGEMM: Target = Target::new(c"cblas_sgemm", c"scipy_cblas_sgemm");
static DGEMM: Target = Target::new(c"cblas_dgemm", c"scipy_cblas_dgemm");
static CGEMM: Target = Target::new(c"cblas_cgemm", c"scipy_cblas_cgemm");
static SET_NUM_THREADS: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static NUM_CALLS: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn count_call() {
    // Relaxed: a counter that orders nothing.
    NUM_CALLS.fetch_add(1, Ordering::Relaxed);
}

/// The C types of `cblas_?gemm` with 32-bit integers: order, two transpositions, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc.
type Gemm<Scalar, Element> = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    Scalar,
    *const Element,
    c_int,
    *const Element,
    c_int,
    Scalar,
    *mut Element,
    c_int,
);

macro_rules! trampoline {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident, $target:ident, $scalar:ty, $element:ty) => {
        /// Forwards to the installed BLAS.
        ///
        /// # Safety
        /// That of the CBLAS function of this name.
        $(#[$attribute])*
        #[allow(clippy::too_many_arguments)]
        $visibility unsafe extern "C" fn $name(
            order: c_int,
            trans_a: c_int,
            trans_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: $scalar,
            a: *const $element,
            lda: c_int,
            b: *const $element,
            ldb: c_int,
            beta: $scalar,
            c: *mut $element,
            ldc: c_int,
        ) {
            // SAFETY: the address is that of the CBLAS function of this name.
            unsafe {
                let gemm: Gemm<$scalar, $element> = transmute($target.address());
                gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
            }
        }
    };
}

trampoline!(pub(crate) fn forward_sgemm, SGEMM, f32, f32);
trampoline!(
    // SAFETY: the name is exported for libraries that look for a CBLAS, and has its signature and meaning.
    #[unsafe(no_mangle)]
    fn cblas_dgemm, DGEMM, f64, f64
);
trampoline!(
    // SAFETY: as above.
    #[unsafe(no_mangle)]
    fn cblas_cgemm, CGEMM, *const c_void, c_void
);

/// Loads the OpenBLAS at a path, all or nothing, see the stub.
#[pyfunction]
#[pyo3(signature = (path))]
pub(crate) fn install_blas(path: &str) -> CoreResult<String> {
    let invalid = |message: String| Error::invalid("path", message);
    let file_name = CString::new(path).map_err(|_| invalid(format!("{path:?} holds a null byte")))?;
    // SAFETY: the name is a string. The library's own initialisers run, as in any import.
    let library = unsafe { dlopen(file_name.as_ptr(), RTLD_NOW) };
    if library.is_null() {
        // SAFETY: after a failure, `dlerror` gives a string.
        let reason = unsafe { CStr::from_ptr(dlerror()) };
        return Err(invalid(reason.to_string_lossy().into_owned()).into());
    }
    let symbol = |name: &CStr| {
        // SAFETY: an open library and a string.
        let address = unsafe { dlsym(library, name.as_ptr()) };
        if address.is_null() {
            Err(invalid(format!("{path} has no {}", name.to_string_lossy())))
        } else {
            Ok(address)
        }
    };
    let targets = [&SGEMM, &DGEMM, &CGEMM];
    let [s, d, c] = targets.map(|target| symbol(target.prefixed_name));
    let (addresses, config) = ([s?, d?, c?], symbol(c"scipy_openblas_get_config")?);
    // Release pairs with the Acquire load in `set_blas_threads`.
    SET_NUM_THREADS.store(symbol(c"scipy_openblas_set_num_threads")?, Ordering::Release);
    for (target, address) in targets.into_iter().zip(addresses) {
        // Release pairs with the Acquire load in `Target::address`.
        target.address.store(address, Ordering::Release);
    }
    set_blas_threads(1); // see `sgemm` for why
    // SAFETY: OpenBLAS's function of this name takes nothing and returns a static string.
    let config = unsafe {
        let config: unsafe extern "C" fn() -> *const c_char = transmute(config);
        CStr::from_ptr(config())
    };
    Ok(config.to_string_lossy().trim().to_owned())
}

/// Whether `install_blas` has succeeded.
pub(crate) fn is_installed() -> bool {
    // Acquire pairs with the Release store in `install_blas`.
    !SGEMM.address.load(Ordering::Acquire).is_null()
}

/// Sets how many threads of its own the installed BLAS uses; nothing if none is installed.
pub(crate) fn set_blas_threads(num_threads: usize) {
    // Acquire pairs with the Release store in `install_blas`.
    let address = SET_NUM_THREADS.load(Ordering::Acquire);
    if !address.is_null() {
        // SAFETY: OpenBLAS's function of this name takes the number of threads.
        unsafe {
            let set_num_threads: unsafe extern "C" fn(c_int) = transmute(address);
            set_num_threads(num_threads as c_int);
        }
    }
}

/// Calls that went through the trampolines, see the stub.
#[pyfunction]
pub(crate) fn blas_num_calls() -> usize {
    NUM_CALLS.load(Ordering::Relaxed)
}

/// The library that `cblas_sgemm` means in the global scope, see the stub.
#[pyfunction]
pub(crate) fn global_blas_path() -> Option<String> {
    // SAFETY: no name means the program itself, whose handle stands for the global scope.
    let address = unsafe { dlsym(dlopen(ptr::null(), RTLD_NOW), SGEMM.name.as_ptr()) };
    if address.is_null() {
        return None;
    }
    library_of(address).map(|file_name| file_name.to_string_lossy().into_owned())
}
