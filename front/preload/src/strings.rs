//! Lists of strings in C's format: arguments and environments. Nothing here allocates, since a
//! child of vfork(2) reads them, too.
#![allow(unsafe_code)] // lists and strings end with a zero, which only their owner can promise

use std::ffi::CStr;
use std::marker::PhantomData;

use libc::c_char;

/// Arguments or an environment: pointers to strings, and a null pointer at the end.
pub type Strings = *const *const c_char;

/// The most entries of an array that is made of the arguments of a variadic function, the null
/// pointer at their end included.
pub const MOST: usize = 2048;

/// A list of strings.
#[derive(Clone, Copy)]
pub struct List<'a> {
    first: Strings,
    strings: PhantomData<&'a CStr>,
}

impl<'a> List<'a> {
    /// Makes a list of the strings at `first`; a null pointer is an empty list.
    ///
    /// # Safety
    /// `first` is null, or a list of strings that ends with a null pointer and lives as long as
    /// `'a`.
    pub unsafe fn new(first: Strings) -> Self {
        Self { first, strings: PhantomData }
    }

    /// Returns the environment of this process, for a call during which the program does not change
    /// it (environ(7)).
    pub fn environment() -> Self {
        // SAFETY: libc's own variable, an environment.
        unsafe { Self::new(environment()) }
    }

    /// Returns the strings.
    pub fn iter(self) -> impl Iterator<Item = &'a CStr> {
        let mut next = self.first;
        std::iter::from_fn(move || {
            // SAFETY: the list has not ended yet (`new`).
            let one = if next.is_null() { return None } else { unsafe { *next } };
            if one.is_null() {
                return None;
            }
            // SAFETY: the list goes on after an entry that is not null.
            next = unsafe { next.add(1) };
            // SAFETY: each entry of a list is a string.
            Some(unsafe { CStr::from_ptr(one) })
        })
    }

    /// Returns what follows `name` in the first string that begins with it: the value of a variable
    /// if `name` ends with `=`.
    pub fn value(self, name: &[u8]) -> Option<&'a [u8]> {
        self.iter().find_map(|text| text.to_bytes().strip_prefix(name))
    }
}

/// Returns libc's `environ`.
pub fn environment() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: libc's own variable.
    unsafe { environ }
}

/// Returns the result of `call`, which is given an array of the arguments that `get` returns by
/// number, up to the null pointer. Returns `None` if they are more than [`MOST`]. Asks for no
/// argument after the null pointer.
pub fn with_array<T>(
    mut get: impl FnMut(usize) -> *const c_char,
    call: impl FnOnce(&[*const c_char]) -> T,
) -> Option<T> {
    let mut array = [std::ptr::null::<c_char>(); MOST];
    for at in 0..MOST {
        array[at] = get(at);
        if array[at].is_null() {
            return Some(call(&array[..=at]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `check` with a list of `texts`.
    fn with_list(texts: &[&CStr], check: impl FnOnce(List<'_>)) {
        let mut list: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        list.push(std::ptr::null());
        // SAFETY: the list ends with a null pointer, and lives longer than the call.
        check(unsafe { List::new(list.as_ptr()) });
    }

    #[test]
    fn a_list_ends_at_its_null_pointer() {
        with_list(&[c"a", c"", c"b=c"], |list| {
            assert!(list.iter().eq([c"a", c"", c"b=c"]));
            let mut strings = list.iter();
            assert_eq!(strings.by_ref().count(), 3);
            assert_eq!(strings.next(), None, "nothing is read beyond the end");
        });
        with_list(&[], |list| assert_eq!(list.iter().next(), None));
        // SAFETY: a null pointer is an empty list.
        assert_eq!(unsafe { List::new(std::ptr::null()) }.iter().next(), None);
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        with_list(&[c"LD_PRELOAD", c"OLD_PRELOAD=1", c"LD_PRELOAD=/a", c"LD_PRELOAD=/b"], |list| {
            assert_eq!(list.value(b"LD_PRELOAD="), Some(&b"/a"[..]));
            assert_eq!(list.value(b"PATH="), None);
        });
        with_list(&[c"PATH="], |list| assert_eq!(list.value(b"PATH="), Some(&b""[..])));
        with_list(&[c"\xff\xfe=\xff"], |list| {
            assert_eq!(list.value(b"\xff\xfe="), Some(&b"\xff"[..]), "it need not be UTF-8");
        });
    }

    #[test]
    fn the_environment_of_this_process_is_libcs() {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = List::environment().value(b"PATH=").unwrap_or_default();
        assert_eq!(found, path.as_encoded_bytes());
    }

    #[test]
    fn arguments_are_an_array_with_their_null_pointer() {
        let text = c"text".as_ptr();
        for count in [0, 1, 5, 6, MOST - 1] {
            let mut asked = 0;
            let get = |at: usize| {
                asked = at + 1;
                if at < count { text } else { std::ptr::null() }
            };
            let length = with_array(get, |array| {
                assert!(array[..count].iter().all(|one| *one == text));
                assert!(array[count].is_null());
                array.len()
            });
            assert_eq!((length, asked), (Some(count + 1), count + 1));
        }
    }

    #[test]
    fn arguments_without_an_end_are_too_many() {
        let mut asked = 0;
        let get = |_: usize| {
            asked += 1;
            c"text".as_ptr()
        };
        assert_eq!(with_array(get, |array| array.len()), None);
        assert_eq!(asked, MOST);
    }
}
