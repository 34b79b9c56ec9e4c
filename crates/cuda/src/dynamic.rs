//! Functions of a library that was loaded at run time, with results as plain numbers.
//!
//! Owns: looking a function up once, and its type with an integer result. The binding declares results as Rust
//! enums; a library newer than the binding may return a number that such an enum does not list, and to hold that number in it
//! would be undefined behaviour.
//! Never: loads a library, or knows what a number means.
//! Invariant: a function that the library does not have is an error, not a panic.

use std::ffi::c_int;
use std::sync::OnceLock;

/// A function of which nothing but its address is known.
type Erased = unsafe extern "C" fn();

/// Where a caller keeps a function that it looked up.
#[derive(Debug)]
pub(crate) struct Slot(OnceLock<Option<Erased>>);

/// A function of the binding, `unsafe fn(…) -> Result`.
pub(crate) trait Signature: Copy {
    /// The same function as the library has it, its result a number.
    type Raw: Copy;
}

macro_rules! signatures {
    ($($($argument:ident)*;)*) => {$(
        impl<R, $($argument),*> Signature for unsafe fn($($argument),*) -> R {
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
    A B C D E F G H I J K L M N O P;
}

impl Slot {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The function as the library has it, by the binding's declaration; `find` looks it up, once.
    ///
    /// # Safety
    /// `find` gives the address of the function that `declared` declares, which returns an enum of 32 bits.
    pub(crate) unsafe fn get<F: Signature>(
        &self,
        _declared: F,
        find: impl FnOnce() -> Option<Erased>,
    ) -> Option<F::Raw> {
        let found = (*self.0.get_or_init(find))?;
        const { assert!(size_of::<F::Raw>() == size_of::<Erased>()) };
        // SAFETY: pointers to functions of one size; the caller vouches for the type.
        Some(unsafe { std::mem::transmute_copy::<Erased, F::Raw>(&found) })
    }
}

/// Stands in a function's type for the type of an argument.
macro_rules! argument {
    ($argument:expr) => {
        _
    };
}
pub(crate) use argument;

/// Calls a function of a library (`library` gives it): `Some` result as a number, or `None` if the library lacks it.
macro_rules! call_raw {
    ($library:path, $($declared:ident)::+ ($($argument:expr),*)) => {{
        static FOUND: crate::dynamic::Slot = crate::dynamic::Slot::new();
        let declared: unsafe fn($(crate::dynamic::argument!($argument)),*) -> _ =
            $($declared)::+;
        let name = crate::dynamic::last_name(stringify!($($declared)::+));
        // SAFETY: the binding's own declaration of the function; callers say what arguments promise.
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

/// The last part of a path: `sys::cuInit` → `cuInit`.
pub(crate) fn last_name(path: &'static str) -> &'static str {
    path.rsplit(':').next().unwrap_or(path).trim_start()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the binding's kind: a result that lists two numbers.
    #[derive(Debug)]
    #[repr(u32)]
    #[allow(dead_code)] // Never made: it is the type of a result.
    enum Listed {
        Zero = 0,
        One = 1,
    }

    unsafe fn declared(_: u64) -> Listed {
        unreachable!("only its type is looked at")
    }

    unsafe extern "C" fn newer_than_the_binding(given: u64) -> c_int {
        given as c_int
    }

    #[test]
    fn a_number_that_the_binding_does_not_list_arrives_as_it_is() {
        let slot = Slot::new();
        let erase = |function: unsafe extern "C" fn(u64) -> c_int| {
            // SAFETY: called below with the type it has.
            unsafe { std::mem::transmute::<unsafe extern "C" fn(u64) -> c_int, Erased>(function) }
        };
        // SAFETY: the declared argument is the function's.
        let raw = unsafe {
            slot.get(declared as unsafe fn(u64) -> Listed, || {
                Some(erase(newer_than_the_binding))
            })
        };
        // SAFETY: plain code.
        assert_eq!(unsafe { raw.unwrap()(4711) }, 4711);
    }

    #[test]
    fn a_function_that_is_not_there_is_none() {
        // SAFETY: nothing is found, so nothing is called.
        let raw = unsafe { Slot::new().get(declared as unsafe fn(u64) -> Listed, || None) };
        assert!(raw.is_none());
    }

    #[test]
    fn a_function_goes_by_the_last_part_of_its_path() {
        assert_eq!(last_name("cudarc::driver::sys::cuInit"), "cuInit");
        assert_eq!(last_name("sys :: cuInit"), "cuInit");
    }
}
