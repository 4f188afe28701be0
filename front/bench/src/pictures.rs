//! Checks what a reader of a picture relies on, for the tests of everything that draws.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use crate::svg::tests::well_formed;

/// An element of a picture.
#[derive(Clone, Debug)]
pub(crate) struct Element {
    /// The name: `rect`, `text` and so on.
    pub tag: String,
    /// The attributes, as they stand in the picture.
    attributes: String,
    /// The text inside, without entities; empty for other elements.
    pub text: String,
}

impl Element {
    /// Returns the value of an attribute, or an empty text if there is none.
    pub(crate) fn get(&self, name: &str) -> &str {
        let begin = format!(" {name}=\"");
        let found = self.attributes.split_once(&begin);
        found.and_then(|(_, rest)| rest.split('"').next()).unwrap_or_default()
    }

    /// Returns the value of an attribute as a number, or 0 if it is none.
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.get(name).parse().unwrap_or(0.0)
    }

    /// Returns the places of a line.
    pub(crate) fn points(&self) -> Vec<(f64, f64)> {
        let pair = |word: &str| {
            let (x, y) = word.split_once(',')?;
            Some((x.parse().ok()?, y.parse().ok()?))
        };
        self.get("points").split_ascii_whitespace().filter_map(pair).collect()
    }

    /// Returns where a text begins and ends, by a guess of a letter's width.
    fn span(&self) -> (f64, f64) {
        let width = self.text.chars().count() as f64 * self.number("font-size") * 0.58;
        let begin = match self.get("text-anchor") {
            "end" => self.number("x") - width,
            "middle" => self.number("x") - width / 2.0,
            _ => self.number("x"),
        };
        (begin, begin + width)
    }
}

/// Returns the elements of a picture in the order in which they are drawn.
pub(crate) fn elements(picture: &str) -> Vec<Element> {
    let element = |part: &str| {
        let (head, text) = part.split_once('>')?;
        let tag = head.split([' ', '/']).next().filter(|tag| !tag.is_empty())?;
        let mut text = text.trim().to_owned();
        for (entity, letter) in
            [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")]
        {
            text = text.replace(entity, letter);
        }
        Some(Element { tag: tag.to_owned(), attributes: head.to_owned(), text })
    };
    picture.split('<').skip(1).filter_map(element).collect()
}

/// Checks a picture: it is well-formed, each heading says which way is better, each text is inside
/// the picture, and no figure is a rounded zero of a large unit.
pub(crate) fn sound(picture: &str) -> Result<()> {
    well_formed(picture)?;
    let all = elements(picture);
    let width = all.first().map_or(0.0, |svg| svg.number("width"));
    for one in all.iter().filter(|one| one.tag == "text") {
        let (text, x) = (&one.text, one.number("x"));
        // The second one of a row of panels is in the middle.
        let is_at = x == 12.0 || x == 612.0 && width == 1200.0;
        let is_heading = one.get("text-anchor") == "start" && is_at;
        ensure!(!is_heading || text.ends_with("is better)"), "which way is better: {text}");
        let (begin, end) = one.span();
        let is_inside = begin >= 0.0 && end <= width;
        ensure!(is_inside || !one.get("transform").is_empty(), "outside: {text} {begin} {end}");
        let words: Vec<&str> = text.split(' ').collect();
        for pair in words.windows(2) {
            let is_zero = pair[0].contains('.') && pair[0].parse::<f64>() == Ok(0.0);
            let has_unit = pair[1].starts_with(char::is_alphabetic);
            ensure!(!(is_zero && has_unit), "a rounded zero: {text}");
        }
    }
    Ok(())
}

/// Checks a picture of bars as [`sound`] does; also, each name has one colour, and no two names
/// have the same.
pub(crate) fn fair(picture: &str) -> Result<()> {
    sound(picture)?;
    let mut colours: BTreeMap<String, String> = BTreeMap::new();
    let (mut name, mut found) = (None, 0);
    for one in elements(picture) {
        if one.tag == "text" {
            name = (one.get("text-anchor") == "end").then_some(one.text);
        } else if one.tag == "rect"
            && let Some(name) = name.take()
        {
            found += 1;
            let fill = one.get("fill").to_owned();
            let earlier = colours.insert(name.clone(), fill.clone());
            ensure!(earlier.is_none_or(|colour| colour == fill), "{name} has two colours");
        }
    }
    ensure!(found > 0, "no bars");
    for (name, fill) in &colours {
        let other = colours.iter().find(|(other, colour)| *other != name && *colour == fill);
        ensure!(other.is_none(), "{name} has the colour of {other:?}");
    }
    Ok(())
}

/// Checks that a label of an axis is a round number: at most two digits that are not zeros at the
/// ends.
pub(crate) fn is_round(label: &str) -> bool {
    let number: String = label.chars().filter(char::is_ascii_digit).collect();
    number.trim_matches('0').len() <= 2
}

#[test]
fn the_checks_can_fail() {
    let picture = |inside: &str| format!("<svg width=\"300\" height=\"9\">{inside}</svg>");
    let text = |x: u32, anchor: &str, words: &str| {
        format!(
            "<text x=\"{x}\" y=\"5\" text-anchor=\"{anchor}\" font-size=\"10\">\n{words}\n</text>"
        )
    };
    let bar = |name: &str, fill: &str| {
        text(100, "end", name) + &format!("<rect x=\"100\" width=\"5\" fill=\"{fill}\"/>")
    };
    sound(&picture(&text(12, "start", "rate (more is better)"))).unwrap();
    for bad in [
        text(12, "start", "rate"),
        text(250, "start", "beyond the right edge"),
        text(20, "end", "left of it"),
        text(20, "start", "0.00 Mpps"),
    ] {
        assert!(sound(&picture(&bad)).is_err(), "{bad}");
    }
    let both = |one: &str, other: &str| fair(&picture(&(bar("a", one) + &bar("b", other))));
    both("#111111", "#222222").unwrap();
    assert!(both("#111111", "#111111").is_err());
    assert!(fair(&picture(&(bar("a", "#1") + &bar("a", "#2")))).is_err());
    assert!(fair(&picture("")).is_err());
    assert!(is_round("50.0 k") && is_round("0") && is_round("1.00 µs") && is_round("25"));
    assert!(!is_round("47.68") && !is_round("123 ms"));
}
