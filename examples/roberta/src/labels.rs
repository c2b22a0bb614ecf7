//! The names of labels: which row of a classification head is which label of the data.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::Config;

/// The names of a head with `rows` rows, in their order, as `id2label` and `label2id` of `config.json` say. Without names they are
/// `LABEL_0` and so on, as in `transformers`.
///
/// # Errors
/// If the two fields contradict each other, or name another number of labels.
pub fn of_head(config: &Config, rows: usize) -> Result<Vec<String>> {
    let (names, ids) = (id2label(config)?, label2id(config)?);
    let given = match (
        names.filter(|names| !are_placeholders(names)),
        ids.filter(|names| !are_placeholders(names)),
    ) {
        (Some(names), Some(ids)) => {
            ensure!(
                names == ids,
                "id2label says {}, label2id {}: correct the one that is wrong",
                list(&names),
                list(&ids)
            );
            Some(names)
        }
        (names, ids) => names.or(ids),
    };
    let Some(names) = given else { return Ok((0..rows).map(placeholder).collect()) };
    ensure!(
        names.len() == rows,
        "id2label names {} labels, {}, and the classification head has {rows} rows",
        names.len(),
        list(&names)
    );
    Ok(names)
}

fn id2label(config: &Config) -> Result<Option<Vec<String>>> {
    let Some(map) = object(config, "id2label")? else { return Ok(None) };
    let mut names = BTreeMap::new();
    for (id, name) in map {
        let id: usize = id.parse().with_context(|| format!("id2label: {id:?} is no number"))?;
        let name = match name {
            Value::String(name) => name.clone(),
            Value::Number(name) => name.to_string(),
            other => bail!("id2label: {other} is no name"),
        };
        ensure!(names.insert(id, name).is_none(), "id2label names {id} twice");
    }
    in_order("id2label", names)
}

fn label2id(config: &Config) -> Result<Option<Vec<String>>> {
    let Some(map) = object(config, "label2id")? else { return Ok(None) };
    let mut names = BTreeMap::new();
    for (name, id) in map {
        let id = match id {
            Value::Number(id) => id.as_u64().and_then(|id| usize::try_from(id).ok()),
            Value::String(id) => id.parse().ok(),
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
        };
        let id = id.with_context(|| format!("label2id: {name:?} has no number"))?;
        ensure!(names.insert(id, name.clone()).is_none(), "label2id has two names for {id}");
    }
    in_order("label2id", names)
}

fn object<'a>(config: &'a Config, field: &str) -> Result<Option<&'a serde_json::Map<String, Value>>> {
    match config.other.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => bail!("{field} is {other}: it must be a map"),
    }
}

fn in_order(field: &str, names: BTreeMap<usize, String>) -> Result<Option<Vec<String>>> {
    for (expected, id) in names.keys().enumerate() {
        ensure!(*id == expected, "{field} has no name for {expected}");
    }
    Ok(Some(names.into_values().collect()))
}

fn placeholder(id: usize) -> String {
    format!("LABEL_{id}")
}

/// Whether no label has a name of its own.
pub fn are_placeholders(names: &[String]) -> bool {
    names.iter().enumerate().all(|(id, name)| *name == placeholder(id))
}

/// For each label of the data the row of the head with its name; upper and lower case are one.
///
/// # Errors
/// If the names are not the same. The error has both lists.
pub fn rows_of(data: &[String], head: &[String]) -> Result<Vec<usize>> {
    let row = |name: &String| {
        let same = |other: &String| other.trim().to_lowercase() == name.trim().to_lowercase();
        let mut rows = (0..head.len()).filter(|&row| same(&head[row]));
        rows.next().filter(|_| rows.next().is_none())
    };
    let rows: Option<Vec<usize>> = data.iter().map(row).collect();
    let one_each = |rows: &Vec<usize>| (0..head.len()).all(|row| rows.contains(&row));
    let remedy = "give them the same names (id2label and label2id in config.json, labels.json of the data), or begin with a new \
                  head: --new-head";
    let placeholders = if are_placeholders(head) { ", which say nothing" } else { "" };
    rows.filter(|rows| rows.len() == head.len() && one_each(rows)).with_context(|| {
        format!(
            "the model's classification head has the labels {}{placeholders}, the data has {}: {remedy}",
            list(head),
            list(data)
        )
    })
}

/// A list of names for an error.
pub fn list(names: &[String]) -> String {
    format!("[{}]", names.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(fields: Value) -> Config {
        let json = include_str!("../models/tiny-roberta/config.json");
        let mut json: Value = serde_json::from_str(json).unwrap();
        for (name, value) in fields.as_object().unwrap() {
            json[name] = value.clone();
        }
        Config::parse(&json.to_string()).unwrap()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_head_s_labels_are_those_of_either_field_in_the_order_of_their_numbers() {
        let of = |fields, rows| of_head(&config(fields), rows).map_err(|error| format!("{error:#}"));
        let numbers: Vec<String> = (0..11).map(|id| format!("n{id}")).collect();
        let map: serde_json::Map<String, Value> =
            (0..11).map(|id| (id.to_string(), json!(format!("n{id}")))).collect();
        assert_eq!(of(json!({ "id2label": map }), 11).unwrap(), numbers, "10 follows 9, not 1");
        assert_eq!(of(json!({"id2label": {"0": "SPAM", "1": "HAM"}}), 2).unwrap(), ["SPAM", "HAM"]);
        assert_eq!(of(json!({"label2id": {"HAM": 1, "SPAM": "0"}}), 2).unwrap(), ["SPAM", "HAM"]);
        assert_eq!(of(json!({}), 3).unwrap(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
        let half = json!({"id2label": {"0": "a", "1": "b"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}});
        assert_eq!(of(half, 2).unwrap(), ["a", "b"]);
        let cases = [
            (
                json!({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 1, "b": 0}}),
                2,
                "id2label says [a, b], label2id [b, a]",
            ),
            (
                json!({"id2label": {"0": "a", "1": "b"}}),
                3,
                "id2label names 2 labels, [a, b], and the classification head has 3 rows",
            ),
            (json!({"id2label": {"0": "a", "2": "b"}}), 2, "id2label has no name for 1"),
            (json!({"id2label": {"x": "a"}}), 1, "\"x\" is no number"),
            (json!({"label2id": {"a": 0, "b": 0}}), 2, "label2id has two names for 0"),
            (json!({"id2label": ["a", "b"]}), 2, "id2label is [\"a\",\"b\"]: it must be a map"),
        ];
        for (fields, rows, expected) in cases {
            let error = of(fields, rows).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn labels_are_found_by_their_names_or_both_lists_are_named() {
        let data = names(&["ham", "spam"]);
        assert_eq!(rows_of(&data, &names(&["SPAM", "HAM"])).unwrap(), [1, 0]);
        assert_eq!(rows_of(&data, &names(&["ham", "spam"])).unwrap(), [0, 1]);
        let three = names(&["c", "a", "b"]);
        assert_eq!(rows_of(&names(&["a", "b", "c"]), &three).unwrap(), [1, 2, 0]);
        for head in [["ham", "eggs"], ["LABEL_0", "LABEL_1"], ["ham", "HAM"]] {
            let error = rows_of(&data, &names(&head)).unwrap_err().to_string();
            let lists = [list(&names(&head)), list(&data)];
            assert!(lists.iter().all(|list| error.contains(list)) && error.contains("--new-head"), "{error}");
        }
    }
}
