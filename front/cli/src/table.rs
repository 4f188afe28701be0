//! Tables on a terminal: columns as wide as their widest cell.

/// Lines of `rows` under `header`, two spaces between columns, nothing behind the last.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    columns(&header, rows)
}

/// As [`table`], where the number of columns is known at run time.
pub fn columns(header: &[&str], rows: &[impl AsRef<[String]>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|title| title.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let head: Vec<String> = header.iter().map(|title| (*title).to_owned()).collect();
    let lines = std::iter::once(&head[..]).chain(rows.iter().map(AsRef::as_ref));
    lines.map(|row| line(row, &widths)).collect()
}

fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
    let text = cells.collect::<Vec<_>>().join("  ");
    format!("{}\n", text.trim_end())
}

/// What a hostile guest could put into a cell must not move the cursor.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// "3 minutes ago" from a CLOCK_REALTIME in ns.
pub fn ago(then_ns: u64) -> String {
    let seconds = slipway_runtime::time::realtime_ns().saturating_sub(then_ns) / 1_000_000_000;
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
        assert_eq!(printable("a\x1b[2Jb"), "a\u{fffd}[2Jb");
    }
}
