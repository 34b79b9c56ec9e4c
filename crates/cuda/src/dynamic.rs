//! Functions of a library that is loaded at run time, with their results as plain numbers.
//!
//! Owns: the lookup of each function, once, and its type with an integer result. The binding
//! declares results as Rust enums. A library newer than the binding may return a number that the
//! enum does not list, and an enum with such a value is undefined behaviour.
//! Never: loads a library; interprets a number.
//! Invariant: a function that the library lacks is an error, not a panic.

use std::ffi::c_int;
use std::sync::OnceLock;

/// A function of which only the address is known.
type ErasedFn = unsafe extern "C" fn();

/// The place where a caller keeps a function after the first lookup.
#[derive(Debug)]
pub(crate) struct FoundFn(OnceLock<Option<ErasedFn>>);

/// A function type of the binding, `unsafe fn(…) -> Result`.
pub(crate) trait BindingFn: Copy {
    /// The same function type with an integer result.
    type Raw: Copy;
}

macro_rules! signatures {
    ($($($argument:ident)*;)*) => {$(
        impl<R, $($argument),*> BindingFn for unsafe fn($($argument),*) -> R {
            type Raw = unsafe extern "C" fn($($argument),*) -> c_int;
        }
    )*};
}

signatures! {
    ;
    A;
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
    A B C D E F G;
    A B C D E F G H;
    A B C D E F G H I;
    A B C D E F G H I J;
    A B C D E F G H I J K;
    A B C D E F G H I J K L;
    A B C D E F G H I J K L M N O P;
}

impl FoundFn {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the library's function with an integer result. `declared` gives its type; `find`
    /// looks it up on the first call.
    ///
    /// # Safety
    /// `find` must return the address of the function that `declared` declares, and that function
    /// must return an enum of 32 bits.
    pub(crate) unsafe fn get<F: BindingFn>(
        &self,
        _declared: F,
        find: impl FnOnce() -> Option<ErasedFn>,
    ) -> Option<F::Raw> {
        let found = (*self.0.get_or_init(find))?;
        const { assert!(size_of::<F::Raw>() == size_of::<ErasedFn>()) };
        // SAFETY: both are function pointers of one size; the caller guarantees the type.
        Some(unsafe { std::mem::transmute_copy::<ErasedFn, F::Raw>(&found) })
    }
}

/// Replaces an argument's type by `_` in a function's type.
macro_rules! argument {
    ($argument:expr) => {
        _
    };
}
pub(crate) use argument;

/// Calls a function of a library, which `library` returns. Gives the result as a number, or `None`
/// if the library lacks the function.
macro_rules! call_raw {
    ($library:path, $($declared:ident)::+ ($($argument:expr),*)) => {{
        static FOUND: crate::dynamic::FoundFn = crate::dynamic::FoundFn::new();
        let declared: unsafe fn($(crate::dynamic::argument!($argument)),*) -> _ =
            $($declared)::+;
        let name = crate::dynamic::last_name(stringify!($($declared)::+));
        // SAFETY: the type is the binding's own declaration; each caller states why its arguments
        // are valid.
        unsafe {
            let raw = FOUND.get(declared, || {
                let found = $library().get::<unsafe extern "C" fn()>(name.as_bytes());
                found.ok().map(|found| *found)
            });
            match raw {
                Some(raw) => Some(raw($($argument),*)),
                None => None,
            }
        }
    }};
}
pub(crate) use call_raw;

/// Returns the last part of a path: `sys::cuInit` → `cuInit`.
pub(crate) fn last_name(path: &'static str) -> &'static str {
    path.rsplit(':').next().unwrap_or(path).trim_start()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result type like the binding's, which lists two numbers.
    #[derive(Debug)]
    #[repr(u32)]
    #[allow(dead_code)] // It is only the type of a result and never constructed.
    enum DeclaredResult {
        Zero = 0,
        One = 1,
    }

    unsafe fn declared(_: u64) -> DeclaredResult {
        unreachable!("only its type is looked at")
    }

    unsafe extern "C" fn newer_than_the_binding(given: u64) -> c_int {
        given as c_int
    }

    #[test]
    fn an_unlisted_result_number_arrives_unchanged() {
        let slot = FoundFn::new();
        let erase = |function: unsafe extern "C" fn(u64) -> c_int| {
            // SAFETY: called below with the type it has.
            unsafe { std::mem::transmute::<unsafe extern "C" fn(u64) -> c_int, ErasedFn>(function) }
        };
        // SAFETY: the declared argument is the function's.
        let raw = unsafe {
            slot.get(declared as unsafe fn(u64) -> DeclaredResult, || {
                Some(erase(newer_than_the_binding))
            })
        };
        // SAFETY: plain code.
        assert_eq!(unsafe { raw.unwrap()(4711) }, 4711);
    }

    #[test]
    fn a_missing_library_function_is_none() {
        // SAFETY: nothing is found, so nothing is called.
        let raw =
            unsafe { FoundFn::new().get(declared as unsafe fn(u64) -> DeclaredResult, || None) };
        assert!(raw.is_none());
    }

    #[test]
    fn a_function_is_looked_up_by_the_last_part_of_its_path() {
        assert_eq!(last_name("cudarc::driver::sys::cuInit"), "cuInit");
        assert_eq!(last_name("sys :: cuInit"), "cuInit");
    }
}
