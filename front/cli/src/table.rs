//! Tables on a terminal: columns as wide as their widest cell. Every cell is made printable,
//! whatever its source.

/// Formats `rows` under `header`, with two spaces between columns and no trailing spaces.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    columns(&header, rows)
}

/// Prints `all` on standard output: as indented JSON, or as a table with a row for each.
///
/// # Errors
/// A value that is no JSON.
pub fn list<T, J: serde::Serialize, const N: usize>(
    all: &[T],
    json: bool,
    as_json: impl Fn(&T) -> J,
    header: [&str; N],
    row: impl Fn(&T) -> [String; N],
) -> anyhow::Result<()> {
    if json {
        return crate::out::json(&all.iter().map(as_json).collect::<Vec<_>>());
    }
    let rows: Vec<_> = all.iter().map(row).collect();
    crate::out::print(format_args!("{}", table(header, &rows)));
    Ok(())
}

/// Formats a table as [`table`] does, with a number of columns that is known at run time.
pub fn columns(header: &[&str], rows: &[impl AsRef<[String]>]) -> String {
    let shown = |row: &[String]| row.iter().map(|cell| printable(cell)).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| shown(row.as_ref())).collect();
    let mut widths: Vec<usize> = header.iter().map(|title| title.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let head: Vec<String> = header.iter().map(|title| (*title).to_owned()).collect();
    let lines = std::iter::once(&head).chain(&rows);
    lines.map(|row| line(row, &widths)).collect()
}

fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
    let text = cells.collect::<Vec<_>>().join("  ");
    format!("{}\n", text.trim_end())
}

/// The longest cell, in characters.
const CELL: usize = 1000;

/// Makes text from a guest safe to print: one line of bounded length without control characters.
pub fn printable(text: &str) -> String {
    slipway_printable::line(text, CELL)
}

/// Formats the age of a CLOCK_REALTIME in ns: "3 minutes ago".
pub fn ago(then_ns: u64) -> String {
    let seconds = slipway_telemetry::realtime_ns().saturating_sub(then_ns) / 1_000_000_000;
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_lines_end_clean() {
        let rows = [["a".to_owned(), "xyz".to_owned()], ["long".to_owned(), String::new()]];
        assert_eq!(table(["N", "V"], &rows), "N     V\na     xyz\nlong\n");
    }

    #[test]
    fn control_characters_are_shown_not_sent() {
        let rows = [["a\x1b[2Jb\n".to_owned()]];
        assert_eq!(table(["N"], &rows), "N\na\\u001b[2Jb\\u000a\n");
    }
}
