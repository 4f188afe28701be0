//! Views of headers in bytes.

use core::fmt;

/// The reason why bytes do not begin with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The header does not end within the bytes.
    Short,
    /// The header has the version of another protocol.
    Version,
    /// The header says that it is shorter than its fixed part.
    HeaderLength,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Short => "the header is cut off",
            Self::Version => "the header has another version",
            Self::HeaderLength => "the header's length is below its minimum",
        })
    }
}

impl core::error::Error for FrameError {}

/// The bytes of a view. A field beyond their end is read as zeros, and is not written.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<T>(pub T);

impl<T: AsRef<[u8]>> Bytes<T> {
    #[inline]
    pub fn len(&self) -> usize {
        self.0.as_ref().len()
    }

    #[inline]
    pub fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        self.rest(at).first_chunk().copied().unwrap_or([0; N])
    }

    #[inline]
    pub fn byte(&self, at: usize) -> u8 {
        self.0.as_ref().get(at).copied().unwrap_or(0)
    }

    #[inline]
    pub fn half(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.get(at))
    }

    /// Returns the bytes before `end`.
    #[inline]
    pub fn until(&self, end: usize) -> &[u8] {
        self.0.as_ref().get(..end).unwrap_or_default()
    }

    /// Returns the bytes from `at` on.
    #[inline]
    pub fn rest(&self, at: usize) -> &[u8] {
        self.0.as_ref().get(at..).unwrap_or_default()
    }
}

impl<T: AsMut<[u8]>> Bytes<T> {
    #[inline]
    pub fn put<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        if let Some(place) = self.rest_mut(at).first_chunk_mut() {
            *place = value;
        }
    }

    #[inline]
    pub fn put_half(&mut self, at: usize, value: u16) {
        self.put(at, value.to_be_bytes());
    }

    #[inline]
    pub fn rest_mut(&mut self, at: usize) -> &mut [u8] {
        self.0.as_mut().get_mut(at..).unwrap_or_default()
    }
}

/// Declares a view with its two constructors. `new_checked` calls the view's method `check`.
macro_rules! view {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name<T>(crate::view::Bytes<T>);

        impl<T: AsRef<[u8]>> $name<T> {
            /// Makes a view of bytes that begin with a header, whatever follows.
            ///
            /// # Errors
            /// [`FrameError`] if the bytes do not begin with a whole header.
            #[inline]
            pub fn new_checked(bytes: T) -> Result<Self, FrameError> {
                let view = Self::new_unchecked(bytes);
                view.check()?;
                Ok(view)
            }

            /// Makes a view of bytes whose header was checked before, or is yet to be written.
            #[inline]
            pub const fn new_unchecked(bytes: T) -> Self {
                Self(crate::view::Bytes(bytes))
            }
        }
    };
}

pub(crate) use view;
