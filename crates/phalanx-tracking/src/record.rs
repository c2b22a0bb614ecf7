//! What is recorded.

use crate::{Histogram, Picture};

/// One thing that was logged.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The step of the training; hyperparameters have none.
    pub step: Option<u64>,
    /// When it was logged, in seconds since 1970.
    pub time: f64,
    /// Its name, such as `loss` or `valid/accuracy`; never empty, and without control characters.
    pub tag: String,
    /// What was logged.
    pub value: Value,
}

/// The kinds of things that are logged.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A number; it may be NaN or infinite.
    Scalar(f64),
    /// The distribution of many numbers.
    Histogram(Histogram),
    /// A picture.
    Picture(Picture),
    /// A text; TensorBoard shows it as Markdown.
    Text(String),
    /// The settings of the run, by name.
    Hyperparameters(Vec<(String, Hyperparameter)>),
}

/// The value of a setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Hyperparameter {
    /// Any number.
    Number(f64),
    /// Yes or no.
    Flag(bool),
    /// Anything else.
    Text(String),
}

impl Record {
    /// About how much memory it takes, in bytes.
    pub(crate) fn size(&self) -> usize {
        let value = match &self.value {
            Value::Scalar(_) => 0,
            Value::Histogram(histogram) => 16 * histogram.counts.len(),
            Value::Picture(picture) => picture.pixels().len(),
            Value::Text(text) => text.len(),
            Value::Hyperparameters(settings) => {
                let text = |setting: &Hyperparameter| match setting {
                    Hyperparameter::Text(text) => text.len(),
                    Hyperparameter::Number(_) | Hyperparameter::Flag(_) => 0,
                };
                settings.iter().map(|(name, setting)| name.len() + text(setting) + 64).sum()
            }
        };
        size_of::<Self>() + self.tag.len() + value
    }
}

/// A tag that is one line in every format.
pub(crate) fn tag(tag: &str) -> String {
    match tag {
        "" => "unnamed".to_owned(),
        tag if tag.contains(char::is_control) => tag.replace(char::is_control, "_"),
        tag => tag.to_owned(),
    }
}

/// The settings in a serialised struct or map: those of inner ones as `optimizer.learning_rate`, lists as JSON.
pub(crate) fn hyperparameters(value: serde_json::Value) -> Vec<(String, Hyperparameter)> {
    let mut found = Vec::new();
    flatten(String::new(), value, &mut found);
    found
}

fn flatten(path: String, value: serde_json::Value, found: &mut Vec<(String, Hyperparameter)>) {
    use serde_json::Value as Json;
    let setting = match value {
        Json::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name } else { format!("{path}.{name}") };
                flatten(path, value, found);
            }
            return;
        }
        Json::Number(number) => exact(&number).map_or_else(
            // As its digits: a seed that is rounded is another seed.
            || Hyperparameter::Text(number.to_string()),
            Hyperparameter::Number,
        ),
        Json::Bool(flag) => Hyperparameter::Flag(flag),
        Json::String(text) => Hyperparameter::Text(text),
        Json::Null => Hyperparameter::Text("none".to_owned()),
        list @ Json::Array(_) => Hyperparameter::Text(list.to_string()),
    };
    found.push((tag(&path), setting));
}

/// The number as a float, if one is exactly that number.
fn exact(number: &serde_json::Number) -> Option<f64> {
    let float = number.as_f64()?;
    // The largest integer of each kind has no float, and its own conversion would be cut off at it.
    let is_exact = match (number.as_u64(), number.as_i64()) {
        (Some(integer), _) => integer < u64::MAX && float as u64 == integer,
        (None, Some(integer)) => float as i64 == integer,
        (None, None) => true,
    };
    is_exact.then_some(float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_settings_have_paths() {
        let settings =
            serde_json::json!({"rate": 0.5, "model": {"layers": 3, "norm": true, "sizes": [1, 2]}});
        let expected = [
            ("model.layers", Hyperparameter::Number(3.0)),
            ("model.norm", Hyperparameter::Flag(true)),
            ("model.sizes", Hyperparameter::Text("[1,2]".into())),
            ("rate", Hyperparameter::Number(0.5)),
        ];
        let mut found = hyperparameters(settings);
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value)));
    }

    #[test]
    fn an_integer_is_no_other_one() {
        let seed = |number: u64| hyperparameters(serde_json::json!({ "seed": number })).remove(0).1;
        assert_eq!(seed(1 << 53), Hyperparameter::Number(9007199254740992.0));
        for number in [(1 << 53) + 1, u64::MAX, u64::MAX - 1] {
            assert_eq!(seed(number), Hyperparameter::Text(number.to_string()));
        }
        let least = hyperparameters(serde_json::json!({ "least": i64::MIN, "odd": i64::MIN + 1 }));
        let digits = Hyperparameter::Text("-9223372036854775807".into());
        assert_eq!((&least[0].1, &least[1].1), (&Hyperparameter::Number(-(2f64.powi(63))), &digits));
    }

    #[test]
    fn the_texts_of_settings_take_memory() {
        let text = Hyperparameter::Text("x".repeat(1 << 20));
        let value =
            Value::Hyperparameters(vec![("note".into(), text), ("rate".into(), Hyperparameter::Number(0.5))]);
        let record = Record { step: None, time: 0.0, tag: "hyperparameters".into(), value };
        assert!(record.size() > 1 << 20);
    }

    #[test]
    fn a_tag_is_one_line() {
        assert_eq!([tag("a/b c"), tag("a\nb\u{0}"), tag("")], ["a/b c", "a_b_", "unnamed"]);
    }
}
