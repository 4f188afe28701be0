//! Standard output for tables and answers, standard error for errors.
//!
//! Names, reasons and messages come from registries, archives and guests. Whatever is printed here loses
//! its control characters on the way (`slipway_printable`), in tables, errors and JSON alike. Two things do
//! not pass: what this program draws itself ([`draw`]), and the output of containers (`run`, `exec`,
//! `attach`, `logs`), which is theirs byte by byte.

/// Prints to standard output, with every control character but line breaks and tabs escaped. Whoever
/// read it may have left, as `head` does: then this command has nothing more to do and ends well.
pub fn print(text: std::fmt::Arguments<'_>) {
    draw(format_args!("{}", slipway_printable::block(&text.to_string())));
}

/// As [`print()`], for what this program has drawn itself: colours and the cursor's movements go through.
/// Foreign text in it must have been made printable before.
pub fn draw(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        let left = error.kind() == std::io::ErrorKind::BrokenPipe;
        if !left {
            eprintln!("slipway: cannot write the output: {error}");
        }
        std::process::exit(if left { 0 } else { crate::run::OWN_FAILURE });
    }
}

/// A line on standard error for an error, whoever worded it.
pub fn complain(error: &anyhow::Error) {
    eprintln!("slipway: {}", error_line(error));
}

/// An error and what caused it in one printable line of bounded length.
fn error_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}").trim_end().replace('\n', " ");
    slipway_printable::line(&text, slipway_printable::MESSAGE)
}

/// A line on standard output.
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
}
