//! TLS by the system's OpenSSL, loaded at run time if it is installed, with the settings that most
//! programs use.
//!
//! Only TLS 1.3 with AES-128-GCM. The client accepts any certificate: the handshake is not
//! measured.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context as _, Result, ensure};

use super::Role;

/// The library's name, with the version of its interface.
const LIBRARY: &CStr = c"libssl.so.3";
const CIPHER: &CStr = c"TLS_AES_128_GCM_SHA256";

// Constants of <openssl/ssl.h>.
const SSL_FILETYPE_PEM: c_int = 1;
const SSL_CTRL_MODE: c_int = 33;
const SSL_CTRL_SET_MIN_PROTO_VERSION: c_int = 123;
const TLS1_3_VERSION: c_long = 0x304;
/// SSL_MODE_ENABLE_PARTIAL_WRITE, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, SSL_MODE_AUTO_RETRY: write
/// as much as fits, retry from another buffer, and continue reading after records without data.
const SSL_MODES: c_long = 1 | 2 | 4;
const SSL_ERROR_WANT_READ: c_int = 2;
const SSL_ERROR_WANT_WRITE: c_int = 3;
const SSL_ERROR_SYSCALL: c_int = 5;
const SSL_ERROR_ZERO_RETURN: c_int = 6;

type Opaque = NonNull<c_void>;

/// Functions of the library, as `<openssl/ssl.h>` declares them.
#[derive(Clone, Copy)]
pub struct OpenSsl {
    client: unsafe extern "C" fn() -> *const c_void,
    server: unsafe extern "C" fn() -> *const c_void,
    context: unsafe extern "C" fn(*const c_void) -> Option<Opaque>,
    control: unsafe extern "C" fn(Opaque, c_int, c_long, *mut c_void) -> c_long,
    ciphers: unsafe extern "C" fn(Opaque, *const c_char) -> c_int,
    certificate: unsafe extern "C" fn(Opaque, *const c_char) -> c_int,
    key: unsafe extern "C" fn(Opaque, *const c_char, c_int) -> c_int,
    session: unsafe extern "C" fn(Opaque) -> Option<Opaque>,
    free: unsafe extern "C" fn(Opaque),
    set_fd: unsafe extern "C" fn(Opaque, c_int) -> c_int,
    connect: unsafe extern "C" fn(Opaque) -> c_int,
    accept: unsafe extern "C" fn(Opaque) -> c_int,
    read: unsafe extern "C" fn(Opaque, *mut c_void, c_int) -> c_int,
    write: unsafe extern "C" fn(Opaque, *const c_void, c_int) -> c_int,
    error: unsafe extern "C" fn(Opaque, c_int) -> c_int,
}

#[allow(unsafe_code)] // a foreign library has no safe form
impl OpenSsl {
    /// Loads the library. Returns `None` if it is not installed.
    #[allow(clippy::missing_transmute_annotations)] // the fields give the types
    pub fn load() -> Option<Self> {
        // SAFETY: the name ends with a zero. The library is never closed, so its functions stay
        // valid.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
        let library = NonNull::new(library)?;
        let find = |name: &CStr| {
            // SAFETY: the library is open, the name ends with a zero.
            NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) })
        };
        /// Converts a symbol to the function type that the field declares.
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field's type is that of the header's declaration; the interface of
                // version 3 is stable.
                unsafe { std::mem::transmute::<Opaque, _>(find($name)?) }
            };
        }
        Some(Self {
            client: function!(c"TLS_client_method"),
            server: function!(c"TLS_server_method"),
            context: function!(c"SSL_CTX_new"),
            control: function!(c"SSL_CTX_ctrl"),
            ciphers: function!(c"SSL_CTX_set_ciphersuites"),
            certificate: function!(c"SSL_CTX_use_certificate_chain_file"),
            key: function!(c"SSL_CTX_use_PrivateKey_file"),
            session: function!(c"SSL_new"),
            free: function!(c"SSL_free"),
            set_fd: function!(c"SSL_set_fd"),
            connect: function!(c"SSL_connect"),
            accept: function!(c"SSL_accept"),
            read: function!(c"SSL_read"),
            write: function!(c"SSL_write"),
            error: function!(c"SSL_get_error"),
        })
    }
}

/// The state that sessions share.
pub struct Context {
    library: OpenSsl,
    context: Opaque,
    role: Role,
}

#[allow(unsafe_code)] // a foreign library has no safe form
impl Context {
    /// Makes a context. `file` has the server's key and certificate.
    ///
    /// # Errors
    /// If OpenSSL is not installed, or refuses the file.
    pub fn new(role: Role, file: &Path) -> Result<Self> {
        let library = OpenSsl::load().context("OpenSSL 3 is not installed (libssl.so.3)")?;
        let file = CString::new(file.as_os_str().as_bytes())?;
        // SAFETY: the library's functions get only objects that the library made just now, and
        // texts that end with a zero.
        unsafe {
            let method = match role {
                Role::Client => (library.client)(),
                Role::Server => (library.server)(),
            };
            let context = (library.context)(method).context("SSL_CTX_new")?;
            let set =
                |command, value| (library.control)(context, command, value, std::ptr::null_mut());
            ensure!(set(SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION) == 1, "TLS 1.3");
            set(SSL_CTRL_MODE, SSL_MODES);
            ensure!((library.ciphers)(context, CIPHER.as_ptr()) == 1, "no AES-128-GCM");
            if role == Role::Server {
                let taken = (library.certificate)(context, file.as_ptr()) == 1
                    && (library.key)(context, file.as_ptr(), SSL_FILETYPE_PEM) == 1;
                ensure!(taken, "OpenSSL refuses the certificate");
            }
            Ok(Self { library, context, role })
        }
    }

    /// Makes a session on `stream`, and does the handshake.
    ///
    /// # Errors
    /// If the handshake fails.
    pub fn shake_hands(&self, stream: TcpStream) -> Result<Session> {
        let library = self.library;
        // SAFETY: the context lives; the session is made here, and has the descriptor as long as it
        // lives.
        unsafe {
            let session = (library.session)(self.context).context("SSL_new")?;
            let session = Session { library, session, stream };
            ensure!(
                (library.set_fd)(session.session, session.stream.as_raw_fd()) == 1,
                "SSL_set_fd"
            );
            let done = match self.role {
                Role::Client => (library.connect)(session.session),
                Role::Server => (library.accept)(session.session),
            };
            ensure!(done == 1, "the TLS handshake failed");
            Ok(session)
        }
    }
}

/// A TLS session.
pub struct Session {
    library: OpenSsl,
    session: Opaque,
    stream: TcpStream,
}

#[allow(unsafe_code)] // a foreign library has no safe form
impl Session {
    /// Sends some of `bytes`. Returns how many.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(1 << 30) as c_int;
        // SAFETY: the session lives, and so do as many bytes.
        let done = unsafe { (self.library.write)(self.session, bytes.as_ptr().cast(), length) };
        self.outcome(done)
    }

    /// Receives into `bytes`. Returns the number of bytes, 0 at the end.
    pub fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let length = bytes.len().min(1 << 30) as c_int;
        // SAFETY: the session lives, and there is room for as many bytes.
        let done = unsafe { (self.library.read)(self.session, bytes.as_mut_ptr().cast(), length) };
        self.outcome(done)
    }

    fn outcome(&self, done: c_int) -> io::Result<usize> {
        if done > 0 {
            return Ok(done as usize);
        }
        // Read first: the next call of this thread may change errno.
        let errno = io::Error::last_os_error();
        // SAFETY: the session lives.
        match unsafe { (self.library.error)(self.session, done) } {
            SSL_ERROR_WANT_READ | SSL_ERROR_WANT_WRITE => Err(io::ErrorKind::WouldBlock.into()),
            SSL_ERROR_ZERO_RETURN => Ok(0),
            SSL_ERROR_SYSCALL => Err(errno),
            // OpenSSL 3 reports an end without a close notice as a protocol error.
            _ => Ok(0),
        }
    }

    /// Sets whether calls return an error where they would block.
    pub fn set_nonblocking(&mut self, yes: bool) -> io::Result<()> {
        self.stream.set_nonblocking(yes)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[allow(unsafe_code)] // a foreign library has no safe form
impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session is ours, and is not used any more.
        unsafe { (self.library.free)(self.session) }
    }
}
