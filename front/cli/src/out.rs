//! Standard output, for tables and answers.

/// Prints to standard output. Whoever read it may have left, as `head` does: then this command has
/// nothing more to do and ends well.
pub fn print(text: std::fmt::Arguments<'_>) {
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

/// A line on standard output.
#[macro_export]
macro_rules! say {
    ($($arguments:tt)*) => {
        $crate::out::print(format_args!("{}\n", format_args!($($arguments)*)))
    };
}
