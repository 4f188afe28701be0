//! Filters of snapshots, in containerd's syntax (its package `filters`): selectors with commas
//! between them, all of which have to match.
//!
//! A selector is a path of fields and perhaps `==` or `!=` with a value; without one it asks
//! whether the field is there. Fields are `name`, `parent`, `kind` and `labels.NAME`. A name or a
//! value that has more than letters, digits and `_` can be quoted as in Go. Regular expressions
//! (`~=`), which containerd itself does not send to snapshotters, are refused.

use std::iter::Peekable;
use std::str::Chars;

use crate::record::{Record, SnapshotKind};
use crate::refusal::{Refusal, Result, shown};

/// The longest filter and the most filters of a call; a longer one is refused.
const LONGEST: usize = 64 << 10;
const MOST: usize = 64;

/// Filters of which one has to match.
#[derive(Debug, PartialEq, Eq)]
pub struct Filters(Vec<Vec<Selector>>);

#[derive(Debug, PartialEq, Eq)]
struct Selector {
    field: Field,
    test: Test,
}

#[derive(Debug, PartialEq, Eq)]
enum Field {
    Name,
    Parent,
    Kind,
    Label(String),
}

#[derive(Debug, PartialEq, Eq)]
enum Test {
    Present,
    Equal(String),
    Differs(String),
}

impl Filters {
    /// Parses the filters of a call. Without filters all snapshots match.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] with the filter.
    pub fn parse(filters: &[String]) -> Result<Self> {
        if filters.len() > MOST {
            return Err(Refusal::Invalid(format!("more than {MOST} filters")));
        }
        let parsed = filters.iter().map(|filter| {
            let failed = |why| Refusal::Invalid(format!("filter {:?}: {why}", shown(filter)));
            if filter.len() > LONGEST {
                return Err(failed("it is too long".to_owned()));
            }
            Parser { rest: filter.chars().peekable() }.selectors().map_err(failed)
        });
        Ok(Self(parsed.collect::<Result<_>>()?))
    }

    /// Returns whether a snapshot matches.
    pub fn match_one(&self, name: &str, record: &Record) -> bool {
        let all = |selectors: &Vec<Selector>| selectors.iter().all(|one| one.fits(name, record));
        self.0.is_empty() || self.0.iter().any(all)
    }
}

impl Selector {
    fn fits(&self, name: &str, record: &Record) -> bool {
        let value = match &self.field {
            Field::Name => Some(name),
            Field::Parent => Some(record.parent.as_str()),
            Field::Kind => Some(match record.kind {
                SnapshotKind::View => "view",
                SnapshotKind::Active => "active",
                SnapshotKind::Committed => "committed",
            }),
            Field::Label(label) => record.labels.get(label).map(String::as_str),
        };
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value == Some(wanted.as_str()),
            // As in containerd, what is not there differs from everything but the empty text.
            Test::Differs(other) => value.unwrap_or_default() != other.as_str(),
        }
    }
}

struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Parser<'_> {
    /// Parses a whole filter. An empty one has no selector, and matches all.
    fn selectors(mut self) -> Result<Vec<Selector>, String> {
        let mut selectors = Vec::new();
        self.skip_space();
        if self.rest.peek().is_none() {
            return Ok(selectors);
        }
        loop {
            selectors.push(self.selector()?);
            match self.next_word() {
                None => return Ok(selectors),
                Some(',') => {}
                Some(other) => return Err(format!("a comma is missing before {other:?}")),
            }
        }
    }

    fn selector(&mut self) -> Result<Selector, String> {
        let mut path = vec![self.field()?];
        self.skip_space();
        while self.rest.next_if_eq(&'.').is_some() {
            path.push(self.field()?);
            self.skip_space();
        }
        let field = match (path[0].as_str(), path.len()) {
            ("name", 1) => Field::Name,
            ("parent", 1) => Field::Parent,
            ("kind", 1) => Field::Kind,
            ("labels", 2..) => Field::Label(path[1..].join(".")),
            _ => return Err(format!("there is no field {}", shown(&path.join(".")))),
        };
        Ok(Selector { field, test: self.test()? })
    }

    fn test(&mut self) -> Result<Test, String> {
        let mut operator = String::new();
        while let Some(character) = self.rest.next_if(|character| "=!~".contains(*character)) {
            operator.push(character);
        }
        match operator.as_str() {
            "" => Ok(Test::Present),
            "==" => Ok(Test::Equal(self.value()?)),
            "!=" => Ok(Test::Differs(self.value()?)),
            "~=" => Err("regular expressions are not supported".to_owned()),
            other => Err(format!("there is no operator {other}")),
        }
    }

    fn field(&mut self) -> Result<String, String> {
        self.skip_space();
        if self.rest.peek() == Some(&'"') {
            return self.quoted();
        }
        let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let word = self.take_while(is_part);
        if word.is_empty() { Err("a field is missing".to_owned()) } else { Ok(word) }
    }

    fn value(&mut self) -> Result<String, String> {
        self.skip_space();
        if self.rest.peek() == Some(&'"') {
            return self.quoted();
        }
        let word = self.take_while(|character| character != ',' && !character.is_whitespace());
        if word.is_empty() { Err("a value is missing".to_owned()) } else { Ok(word) }
    }

    /// Parses a text in quotes, with the escapes of Go.
    fn quoted(&mut self) -> Result<String, String> {
        let open = || "a quote is not closed".to_owned();
        self.rest.next();
        let mut text = String::new();
        loop {
            match self.rest.next().ok_or_else(open)? {
                '"' => return Ok(text),
                '\n' => return Err(open()),
                '\\' => text.push(self.escape()?),
                character => text.push(character),
            }
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        let unknown = || "an escape is not known".to_owned();
        let digits = match self.rest.next().ok_or_else(unknown)? {
            'a' => return Ok('\x07'),
            'b' => return Ok('\x08'),
            'f' => return Ok('\x0c'),
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'v' => return Ok('\x0b'),
            same @ ('\\' | '"') => return Ok(same),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(unknown()),
        };
        let mut code = 0;
        for _ in 0..digits {
            let digit = self.rest.next().and_then(|digit| digit.to_digit(16));
            code = (code << 4) | digit.ok_or_else(unknown)?;
        }
        // A byte above 127 would be a part of a character.
        char::from_u32(code).filter(|_| digits > 2 || code < 128).ok_or_else(unknown)
    }

    fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> String {
        let mut word = String::new();
        while let Some(character) = self.rest.next_if(|character| is_part(*character)) {
            word.push(character);
        }
        word
    }

    fn skip_space(&mut self) {
        self.take_while(char::is_whitespace);
    }

    fn next_word(&mut self) -> Option<char> {
        self.skip_space();
        self.rest.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(filters: &[&str], name: &str, record: &Record) -> bool {
        let filters: Vec<_> = filters.iter().map(|filter| (*filter).to_owned()).collect();
        Filters::parse(&filters).unwrap().match_one(name, record)
    }

    fn record(parent: &str, kind: SnapshotKind, labels: &[(&str, &str)]) -> Record {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Record {
            id: 1,
            kind,
            parent: parent.to_owned(),
            children: 0,
            created_ns: 0,
            updated_ns: 0,
            labels: labels.collect(),
            usage: Default::default(),
            remote: None,
        }
    }

    #[test]
    fn the_filters_that_containerd_sends() {
        let target = "sha256:12ab";
        let label = [("containerd.io/snapshot.ref", target)];
        let layer = record("k8s.io/3/extract-1-x sha256:0", SnapshotKind::Committed, &label);
        // As Go prints the label's name and the parent's.
        let of = |parent: &str| {
            format!("labels.\"containerd.io/snapshot.ref\"=={target},parent==\"{parent}\"")
        };
        assert!(matches(&[&of("k8s.io/3/extract-1-x sha256:0")], "a", &layer));
        assert!(!matches(&[&of("")], "a", &layer));
        assert!(matches(&[&of("")], "a", &record("", SnapshotKind::Committed, &label)));
        assert!(!matches(&[&of("")], "a", &record("", SnapshotKind::Committed, &[])));
        assert!(matches(&[], "a", &layer) && matches(&[""], "a", &layer));
    }

    #[test]
    fn fields_operators_and_several_filters() {
        let labels = [("containerd.io/gc.root", "now"), ("a.b", "c d")];
        let active = record("p", SnapshotKind::Active, &labels);
        for fits in [
            "name==n",
            "name == n , kind == active",
            "kind!=view",
            "parent==p",
            "labels.\"containerd.io/gc.root\"",
            "labels.a.b==\"c d\"",
            "labels.\"a.b\"==\"c\\x20\\u0064\"",
            "labels.none!=x",
            "name!=x,name!=y",
        ] {
            assert!(matches(&[fits], "n", &active), "{fits}");
            assert!(matches(&["name==other", fits], "n", &active), "{fits}");
        }
        for other in ["name==x", "kind==view", "labels.none", "labels.none==x", "name==n,parent==x"]
        {
            assert!(!matches(&[other], "n", &active), "{other}");
        }
    }

    #[test]
    fn what_is_no_filter_is_refused_in_one_line() {
        for bad in [
            "size==1",
            "name=x",
            "name==",
            "name==\"x",
            "name~=x",
            "labels",
            "labels.==x",
            "name==x name",
            ",",
            "name==x,",
            "kind.of==x",
            "labels.\"\\q\"",
            "labels.\"\\xff\"",
            "==x",
            "\"\n",
        ] {
            let parsed = Filters::parse(&[bad.to_owned()]);
            let Err(Refusal::Invalid(why)) = parsed else { panic!("{bad}") };
            assert!(!why.contains('\n') && why.contains("filter"), "{why}");
        }
        assert!(Filters::parse(&vec!["name".to_owned(); MOST + 1]).is_err());
        assert!(Filters::parse(&["x".repeat(LONGEST + 1)]).is_err());
    }
}
