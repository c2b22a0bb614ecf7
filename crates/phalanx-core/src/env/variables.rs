//! Variables, read and checked: each error names the variable, its value and what to do.

use std::str::FromStr;

use crate::error::{Error, Result};

const REMEDY: &str = "start the program with `phalanx run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and \
                      MASTER_PORT for every rank, or none of them for a world of one; under mpirun set \
                      MASTER_ADDR and MASTER_PORT, or PHALANX_RENDEZVOUS=file:///a/shared/path";

/// Variables from a lookup; an empty one counts as unset.
pub(super) struct Variables<F> {
    pub lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    pub fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Checks that each of `names` has a value. The error names all that have none.
    pub fn require(&self, names: &[&str]) -> Result<()> {
        let lacking: Vec<String> = names
            .iter()
            .filter(|name| self.text(name).is_none())
            .map(|name| match (self.lookup)(name) {
                Some(_) => format!("{name} is empty"),
                None => format!("{name} is not set"),
            })
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        Err(Error::environment(lacking.join(", ")).with_remedy(REMEDY))
    }

    pub fn parse<T: FromStr>(&self, name: &str) -> Result<T>
    where
        T::Err: std::fmt::Display,
    {
        self.require(&[name])?;
        let text = self.text(name).unwrap_or_default();
        text.parse().map_err(|error: T::Err| malformed(name, &text, &error.to_string()))
    }

    pub fn parse_optional<T: FromStr>(&self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::fmt::Display,
    {
        self.text(name).is_some().then(|| self.parse(name)).transpose()
    }

    pub fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name).as_deref() {
            None => Ok(false),
            Some(text) if ["1", "true"].iter().any(|yes| text.eq_ignore_ascii_case(yes)) => Ok(true),
            Some(text) if ["0", "false"].iter().any(|no| text.eq_ignore_ascii_case(no)) => Ok(false),
            Some(text) => Err(malformed(name, text, "it is neither True nor False")),
        }
    }
}

pub(super) fn malformed(name: &str, value: &str, why: &str) -> Error {
    Error::environment(format!("{name}={value:?}: {why}"))
        .with_remedy(format!("correct {name}, or unset the launcher's variables for a world of one"))
}
