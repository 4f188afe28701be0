//! Escaping of untrusted text for terminals, tables and logs.
//!
//! A registry's error message, a name in an archive or a guest's last words can contain escape
//! sequences that move the cursor, set the window's title or turn the reading direction. [`line()`]
//! and [`block()`] replace every character that does more than show itself by an escape that names
//! it. The escape is JSON's (`\u001b`), so that a JSON document keeps its meaning.
//!
//! The output of a container itself (`slipway run`, `slipway logs`) is not escaped: it is shown as
//! the program wrote it, as docker does.

/// Maximum length of an error message in characters; a longer one is cut and ends in an ellipsis.
pub const MESSAGE: usize = 2000;

/// Returns `text` as one line of at most `most` characters (at least the ellipsis). Control and
/// formatting characters, line breaks included, are escaped, and a longer text is cut and ends in
/// an ellipsis. Each character of an escape counts, and no escape is cut.
pub fn line(text: &str, most: usize) -> String {
    let mut out = String::with_capacity(text.len().min(most));
    // The characters of `out`, and the bytes of its beginning that leaves room for an ellipsis.
    let (mut count, mut beginning) = (0, 0);
    for c in text.chars() {
        let before = out.len();
        if is_printable(c) {
            out.push(c);
            count += 1;
        } else {
            escape(c, &mut out);
            count += out.len() - before;
        }
        if count > most {
            out.truncate(beginning);
            out.push('…');
            break;
        }
        if count < most {
            beginning = out.len();
        }
    }
    out
}

/// Returns all of `text` with line breaks and tabs kept and every other control or formatting
/// character escaped.
pub fn block(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            _ if is_printable(c) => out.push(c),
            _ => escape(c, &mut out),
        }
    }
    out
}

/// Returns whether a terminal shows `c` and does nothing else. Control characters (C0, DEL, C1),
/// line separators and Unicode's formatting characters (reading direction, zero width, tags) are
/// not printable.
pub fn is_printable(c: char) -> bool {
    let formats = matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    );
    !c.is_control() && !formats
}

/// Appends JSON's escape of `c`: its UTF-16 units, four hex digits each.
fn escape(c: char, out: &mut String) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        out.push_str(&format!("\\u{unit:04x}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_a_cursor_or_turns_text_is_shown_and_not_done() {
        assert_eq!(
            line("a\x1b[2Jb\r\n\u{9b}1m\u{7f}", 99),
            "a\\u001b[2Jb\\u000d\\u000a\\u009b1m\\u007f"
        );
        assert_eq!(line("\u{202e}cod.exe\u{2066}", 99), "\\u202ecod.exe\\u2066");
        assert_eq!(line("\u{e0041}", 99), "\\udb40\\udc41");
        assert_eq!(line("Käse 東京 🧀", 99), "Käse 東京 🧀");
    }

    #[test]
    fn a_line_has_a_longest_length() {
        assert_eq!(line("12345", 5), "12345");
        assert_eq!(line("123456", 5), "1234…");
        assert_eq!((line("\x1bab", 6), line("a\x1bb", 7)), ("…".into(), "a…".into()));
        for most in 1..20 {
            for text in ["\x1b\x1b\x1b\x1b", "ab\x1bcd\x1b", &"é".repeat(30)] {
                assert!(line(text, most).chars().count() <= most, "{most} {text:?}");
            }
        }
    }

    #[test]
    fn a_block_keeps_its_lines_and_json_its_meaning() {
        assert_eq!(block("a\tb\n\x07"), "a\tb\n\\u0007");
        let json = "\"\u{9b}\u{e0041}\"";
        assert_eq!(block(json), "\"\\u009b\\udb40\\udc41\"");
    }
}
