//! Prints tables and answers on standard output, and errors on standard error.
//!
//! Names, reasons and messages come from registries, archives and guests. Everything printed here
//! has its control characters escaped (`slipway_printable`), in tables, errors and JSON alike.
//! There are two exceptions: what this program draws itself ([`draw`]), and the output of
//! containers (`run`, `exec`, `attach`, `logs`), which is passed on byte by byte.

/// The exit status of a command that failed.
pub const FAILURE: i32 = 1;
/// The exit status of a command that ends with a container's or a program's, as `run` does, if
/// Slipway failed and not that.
pub const OWN_FAILURE: i32 = 125;

/// Prints to standard output, with every control character but line breaks and tabs escaped. If the
/// reader has left, as `head` does, the command ends successfully.
pub fn print(text: std::fmt::Arguments<'_>) {
    draw(format_args!("{}", slipway_printable::block(&text.to_string())));
}

/// Prints what this program has drawn itself: unlike [`print()`], it leaves colours and cursor
/// movements as they are. The caller has made foreign text printable.
pub fn draw(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        let left = error.kind() == std::io::ErrorKind::BrokenPipe;
        if !left {
            eprintln!("slipway: cannot write the output: {error}");
        }
        std::process::exit(if left { 0 } else { FAILURE });
    }
}

/// Prints a value on standard output, as indented JSON.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(format_args!("{}\n", serde_json::to_string_pretty(value)?));
    Ok(())
}

/// Prints one line about an error on standard error, whoever worded the error.
pub fn complain(error: &anyhow::Error) {
    eprintln!("slipway: {}", error_line(error));
}

/// Formats an error and its causes as one printable line of bounded length.
fn error_line(error: &anyhow::Error) -> String {
    let text = told_once(error).trim_end().replace('\n', " ");
    slipway_printable::line(&text, slipway_printable::MESSAGE)
}

/// Formats an error and its causes. A cause that the text of the error above it has already, as
/// that of a file's error has, is left out.
fn told_once(error: &anyhow::Error) -> String {
    let mut above = error.to_string();
    let mut all = above.clone();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !above.contains(&cause) {
            all.push_str(": ");
            all.push_str(&cause);
        }
        above = cause;
    }
    all
}

/// Prints a line on standard output.
#[macro_export]
macro_rules! say {
    ($($arguments:tt)*) => {
        $crate::out::print(format_args!("{}\n", format_args!($($arguments)*)))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_does_nothing_to_a_terminal() {
        let hostile = "registry r: \x1b]0;owned\x07\x1b[2J\u{202e}\rslipway: fine\nmore";
        let error = anyhow::anyhow!("{hostile}").context("cannot pull");
        let line = error_line(&error);
        assert!(line.starts_with("cannot pull: registry r: \\u001b]0;owned"), "{line}");
        assert!(line.chars().all(slipway_printable::is_printable), "{line:?}");
        let endless = error_line(&anyhow::anyhow!("{}", "x".repeat(1 << 20)));
        assert!(endless.chars().count() <= slipway_printable::MESSAGE);
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let (action, path) = ("read", std::path::PathBuf::from("/no/such"));
        let error = slipway_image::Error::Io { action, path, source: cause() };
        let once = format!("read /no/such: {}", cause());
        assert_eq!(error_line(&anyhow::Error::new(error)), once);
        let error = anyhow::Error::new(cause()).context("cannot read x").context("no image");
        assert_eq!(error_line(&error), format!("no image: cannot read x: {}", cause()));
    }
}
