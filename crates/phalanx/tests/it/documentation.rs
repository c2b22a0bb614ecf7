//! Pages of docs/ that list what the sources have.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Those of tests and of the soak, which no user sets.
const OWN: [&str; 2] = ["PHALANX_TEST_", "PHALANX_SOAK_"];

/// The names of variables in `text`.
fn variables(text: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
    let words = text.split(|letter: char| !is_name(letter));
    let ours = words.filter(|word| word.len() > "PHALANX_".len() && word.starts_with("PHALANX_"));
    ours.filter(|word| !OWN.iter().any(|own| word.starts_with(own))).map(str::to_owned).collect()
}

/// Of all Rust files below `folder`.
fn used(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            used(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.extend(variables(&fs::read_to_string(&path).unwrap()));
        }
    }
}

#[test]
fn the_page_of_variables_has_those_that_the_sources_have() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = BTreeSet::new();
    used(&root.join("examples"), &mut found);
    for package in fs::read_dir(root.join("crates")).unwrap() {
        let package = package.unwrap().path();
        for folder in ["src", "examples"].map(|folder| package.join(folder)) {
            if folder.is_dir() {
                used(&folder, &mut found);
            }
        }
    }
    assert!(found.contains("PHALANX_TRACE") && found.len() > 15, "the sources were not found: {found:?}");
    let listed = variables(&fs::read_to_string(root.join("docs/variables.md")).unwrap());
    let missing: Vec<_> = found.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/variables.md does not explain {missing:?}");
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "docs/variables.md explains {gone:?}, which nothing reads");
}
