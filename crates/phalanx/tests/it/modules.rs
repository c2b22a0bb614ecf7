//! The modules of the core, and of phalanx-proto beneath it, use each other in one direction, as ARCHITECTURE.md draws it.

use std::fs;
use std::path::{Path, PathBuf};

/// For tests alone: they see everything.
const OF_TESTS: &[&str] = &["fuzz_input", "testing", "some_time"];

/// A crate of the workspace.
fn crate_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// The modules of the drawing with this number, from the bottom to the top: each uses those before it, and none behind it.
fn drawn(number: usize) -> Vec<String> {
    let text = fs::read_to_string(crate_folder("../ARCHITECTURE.md")).unwrap();
    let drawings = text.split("-- modules::`").nth(1).map(|rest| rest.split("```").skip(1).step_by(2));
    let drawing = drawings.and_then(|mut drawings| drawings.nth(number));
    let rows = drawing.expect("a drawing of the modules").lines().rev();
    rows.flat_map(|row| row.split_whitespace().skip(1)).map(str::to_owned).collect()
}

/// The files of a module, without its tests.
fn files(path: &Path, found: &mut Vec<PathBuf>) {
    if path.ends_with("tests") {
        return;
    }
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        entries.for_each(|entry| files(&entry, found));
    } else if path.extension().is_some_and(|extension| extension == "rs")
        && !path.file_stem().unwrap().to_str().unwrap().contains("tests")
    {
        found.push(path.to_owned());
    }
}

/// What follows `crate::` in the code of a file, without comments, up to its module of tests.
fn used(source: &str) -> impl Iterator<Item = &str> {
    let code = source.lines().take_while(|line| !line.trim_end().ends_with("mod tests {"));
    let code = code.filter_map(|line| line.split("//").next());
    let uses = code.flat_map(|line| line.split("crate::").skip(1));
    uses.filter_map(|rest| rest.split(|next: char| !next.is_alphanumeric() && next != '_').next())
}

/// Checks that each module of the crate uses only those that are drawn before it, and those in `beneath`, which are another crate's.
fn check(name: &str, modules: &[String], beneath: &[String]) {
    let source = crate_folder(name).join("src");
    let place = |name: &str| modules.iter().position(|module| module == name);
    let (mut seen, mut against) = (0, Vec::new());
    for entry in fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if name == "lib" || OF_TESTS.contains(&name) {
            continue;
        }
        let Some(own) = place(name) else {
            against.push(format!("ARCHITECTURE.md's drawing lacks the module {name}"));
            continue;
        };
        let mut found = Vec::new();
        files(&path, &mut found);
        for file in found {
            for other in used(&fs::read_to_string(&file).unwrap()) {
                seen += 1;
                // A name that is no module's comes through lib.rs, which sees them all.
                let is_below = place(other).is_some_and(|place| place <= own);
                if !is_below && !OF_TESTS.contains(&other) && !beneath.iter().any(|module| module == other) {
                    against
                        .push(format!("{}: crate::{other}", file.strip_prefix(&source).unwrap().display()));
                }
            }
        }
    }
    assert!(against.is_empty(), "these uses go upwards, or through lib.rs:\n{}", against.join("\n"));
    assert!(seen > 50, "only {seen} uses were found: has the way changed in which they are written?");
}

#[test]
fn the_modules_of_the_core_form_a_directed_graph() {
    check("phalanx-core", &drawn(0), &drawn(1));
}

#[test]
fn the_modules_of_what_is_pure_form_a_directed_graph() {
    check("phalanx-proto", &drawn(1), &[]);
}
