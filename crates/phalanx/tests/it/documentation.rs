//! Pages that list what the sources have, and the links between pages.

use std::collections::BTreeSet;
use std::fs;
use std::iter::once;
use std::path::{Path, PathBuf};

/// Those of tests and of the soak. Hardly any is for a person to set, and nothing checks that the page names these few.
const OWN: [&str; 2] = ["PHALANX_TEST_", "PHALANX_SOAK_"];

/// The names of variables in `text`.
fn variables(text: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
    let words = text.split(|letter: char| !is_name(letter));
    let ours = words.filter(|word| word.len() > "PHALANX_".len() && word.starts_with("PHALANX_"));
    ours.filter(|word| !OWN.iter().any(|own| word.starts_with(own))).map(str::to_owned).collect()
}

/// The files with these extensions in this folder and in those below it.
fn files(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // An example that is a workspace of its own is built in its own folder.
        let is_made = path.file_name().is_some_and(|name| name == "target" || name == ".git");
        if path.is_dir() && !is_made {
            files(&path, extensions, found);
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known))
        {
            found.push(path);
        }
    }
}

/// Calls `look` with all Rust files and shell scripts below `folder`.
fn sources(folder: &Path, look: &mut impl FnMut(&str)) {
    let mut found = Vec::new();
    files(folder, &["rs", "sh", "py"], &mut found);
    for path in found {
        look(&fs::read_to_string(path).unwrap());
    }
}

#[test]
fn the_page_of_variables_has_those_that_the_sources_have() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = BTreeSet::new();
    let mut look = |text: &str| found.extend(variables(text));
    sources(&root.join("examples"), &mut look);
    sources(&root.join("python/src"), &mut look);
    sources(&root.join("python/phalanx_torch"), &mut look);
    sources(&root.join("tests"), &mut look);
    for script in [".ci/run", ".ci/full", ".ci/gpu", "python/check.sh", "tch/check.sh"] {
        look(&fs::read_to_string(root.join(script)).unwrap());
    }
    for package in fs::read_dir(root.join("crates")).unwrap() {
        let package = package.unwrap().path();
        for folder in ["src", "examples"].map(|folder| package.join(folder)) {
            if folder.is_dir() {
                sources(&folder, &mut look);
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

/// GitHub has a job for each.
#[test]
fn what_runs_each_night_is_all_that_runs_without_a_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = fs::read_to_string(root.join(".ci/full")).unwrap();
    let (_, parts) = script.split_once("\n[ $# != 0 ] || parts=(").unwrap();
    let parts: Vec<&str> = parts.split(')').next().unwrap().split_whitespace().collect();
    let workflow = fs::read_to_string(root.join(".github/workflows/full.yml")).unwrap();
    let (_, listed) = workflow.split_once("\n        part:\n").unwrap();
    let listed: Vec<&str> = listed.lines().map_while(|line| line.strip_prefix("          - ")).collect();
    assert!(parts.len() > 20, "{parts:?}");
    assert_eq!(listed, parts);
}

#[test]
fn each_trap_of_the_guide_has_the_test_that_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/guide/fine-tuning-roberta.md")).unwrap();
    let (_, table) = page.split_once("| trap |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let named: Vec<(&str, &str)> = rows
        .map(|row| {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(|cell| cell.trim()).collect();
            let [_, _, package, test] = cells[..] else { panic!("{row}") };
            (package.trim_matches('`'), test.trim_matches('`'))
        })
        .collect();
    assert!(named.len() >= 6, "{named:?}");
    for (package, test) in named {
        let (function, in_a_list) = (format!("#[test]\nfn {test}("), format!("(\"{test}\", "));
        let mut found = 0;
        sources(&root.join("crates").join(package).join("tests"), &mut |text| {
            found += text.matches(&function).count() + text.matches(&in_a_list).count();
        });
        assert_eq!(found, 1, "{package} has no test {test}");
    }
}

#[test]
fn each_bad_input_of_the_guide_has_the_test_that_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = String::new();
    for folder in ["crates", "examples/roberta"] {
        sources(&root.join(folder), &mut |text| all += text);
    }
    let page = fs::read_to_string(root.join("docs/guide/fine-tuning-roberta.md")).unwrap();
    let (_, table) = page.split_once("| input | error | test |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    // The name is the last cell; or it says that it is that of the row above.
    let cells = rows.map(|row| row.trim_end_matches([' ', '|']).rsplit("| ").next().unwrap());
    let named: Vec<&str> =
        cells.filter(|cell| *cell != "the same").map(|cell| cell.trim_matches('`')).collect();
    assert!(named.len() > 8, "{named:?}");
    let missing: Vec<_> = named
        .into_iter()
        .filter(|name| {
            !all.contains(&format!("#[test]\nfn {name}("))
                && !all.contains(&format!("#[test]\n    fn {name}("))
        })
        .collect();
    assert!(missing.is_empty(), "there are no tests {missing:?}");
}

#[test]
fn each_program_of_a_page_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    for folder in ["crates", "docs", "tch"] {
        pages(&root.join(folder), &mut found);
    }
    found.push(root.join("README.md"));
    let is_program = |line: &str| line.starts_with("```rust") && !line.contains("ignore");
    found.retain(|page| fs::read_to_string(page).unwrap().lines().any(is_program));
    // Of the command, whose library is empty, `cargo test` compiles no page.
    let command = fs::canonicalize(root.join("crates/phalanx-cli/README.md")).unwrap();
    let found: BTreeSet<PathBuf> = found.iter().map(|page| fs::canonicalize(page).unwrap()).collect();
    assert!(found.len() > 20 && found.contains(&command), "{found:?}");
    let mut compiled = BTreeSet::from([command]);
    let mut libraries = vec![root.join("tch/src/lib.rs")];
    libraries.extend(
        fs::read_dir(root.join("crates")).unwrap().map(|package| package.unwrap().path().join("src/lib.rs")),
    );
    for library in libraries.into_iter().filter(|library| library.exists()) {
        let text = fs::read_to_string(&library).unwrap();
        for rest in text.split("[doc = include_str!(\"").skip(1) {
            let (page, _) = rest.split_once('"').unwrap();
            compiled.insert(fs::canonicalize(library.with_file_name(page)).unwrap());
        }
    }
    let missing: Vec<&PathBuf> = found.difference(&compiled).collect();
    assert!(missing.is_empty(), "no library has these pages among its tests: {missing:?}");
    // Lines that are indented `cargo test` takes for Rust, whatever they are.
    let has_indented = |page: &&PathBuf| {
        let text = fs::read_to_string(page).unwrap();
        let mut is_in_block = false;
        text.lines().zip(once("").chain(text.lines())).any(|(line, before)| {
            is_in_block ^= line.trim_start().starts_with("```");
            !is_in_block && before.trim().is_empty() && line.starts_with("    ") && !line.trim().is_empty()
        })
    };
    let indented: Vec<&PathBuf> = compiled.iter().filter(has_indented).collect();
    assert!(indented.is_empty(), "these pages have commands outside of ```sh: {indented:?}");
}

#[test]
fn the_files_that_the_architecture_names_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let named: BTreeSet<&str> =
        page.split('`').skip(1).step_by(2).filter(|word| word.ends_with(".rs")).collect();
    assert!(named.len() > 60, "{named:?}");
    let is_there = |name: &str| {
        let of_a_crate = name.split_once('/').is_some_and(|(package, path)| {
            root.join(format!("crates/phalanx-{package}/src")).join(path).exists()
        });
        of_a_crate || root.join("crates/phalanx-core/src").join(name).exists() || root.join(name).exists()
    };
    let gone: Vec<_> = named.into_iter().filter(|name| !is_there(name)).collect();
    assert!(gone.is_empty(), "ARCHITECTURE.md names {gone:?}, which are not there");
}

#[test]
fn the_page_of_the_python_package_has_each_of_its_parts() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let page = fs::read_to_string(root.join("../docs/python-package.md")).unwrap();
    let named: BTreeSet<&str> = page.split('`').skip(1).step_by(2).collect();
    for folder in ["src", "phalanx_torch"] {
        let mut missing = Vec::new();
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let entry = entry.unwrap();
            let (name, is_folder) =
                (entry.file_name().into_string().unwrap(), entry.file_type().unwrap().is_dir());
            let part = format!("python/{folder}/{name}{}", if is_folder { "/" } else { "" });
            let is_source = [".rs", ".py", ".pyi"].iter().any(|end| name.ends_with(end));
            // The interpreter makes the other folder.
            if (is_source || is_folder && name != "__pycache__") && !named.contains(&*part) {
                missing.push(part);
            }
        }
        assert!(missing.is_empty(), "docs/python-package.md does not name {missing:?}");
    }
}

#[test]
fn the_places_of_unsafe_code_are_those_that_are_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let (_, table) = page.split_once("| place | what it does |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let places: Vec<&str> = rows.map(|row| row.split('`').nth(1).unwrap()).collect();
    let listed: BTreeSet<PathBuf> =
        places
            .iter()
            .map(|place| {
                if place.starts_with("phalanx-") { root.join("crates").join(place) } else { root.join(place) }
            })
            .collect();
    let gone: Vec<_> = listed.iter().filter(|place| !place.exists()).collect();
    assert!(places.len() > 8 && gone.is_empty(), "CONTRIBUTING.md lists {gone:?}, which are not there");
    let mut found = Vec::new();
    for folder in ["crates", "tch/src", "python/src"] {
        files(&root.join(folder), &["rs"], &mut found);
    }
    let is_in_src = |path: &PathBuf| path.components().any(|part| part.as_os_str() == "src");
    let allows = |path: &PathBuf| fs::read_to_string(path).unwrap().contains("[allow(unsafe_code)]");
    // A place is a file, or a package with all that it has.
    let is_listed = |path: &PathBuf| listed.iter().any(|place| path.starts_with(place));
    let (known, missing): (Vec<_>, Vec<_>) =
        found.into_iter().filter(|path| is_in_src(path) && allows(path)).partition(is_listed);
    assert!(known.len() > 5, "{known:?}");
    assert!(missing.is_empty(), "CONTRIBUTING.md does not list {missing:?}");
}

/// The pages of this folder and those below it.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    files(folder, &["md"], found);
}

/// The targets of a page's links, without those in its programs.
fn links(page: &str) -> Vec<&str> {
    let outside = page.split("```").step_by(2);
    let after = outside.flat_map(|text| text.split("](").skip(1));
    after.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// The anchors that a page's headings have on GitHub and in mdBook.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.split("```").step_by(2).flat_map(str::lines).filter(|line| line.starts_with('#'));
    let letter = |letter: char| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ => letter.is_alphanumeric().then_some(letter),
    };
    let text = |line: &str| line.trim_start_matches('#').trim().to_lowercase();
    headings.map(|line| text(line).chars().filter_map(letter).collect()).collect()
}

#[test]
fn links_between_pages_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = Vec::new();
    pages(&root, &mut all);
    assert!(all.len() > 40, "{all:?}");
    let (mut broken, mut checked) = (Vec::new(), 0);
    for path in &all {
        let page = fs::read_to_string(path).unwrap();
        for link in links(&page).into_iter().filter(|link| !link.contains("://") && !link.contains(' ')) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let is_page = target.extension().is_some_and(|extension| extension == "md");
            let is_there = match fs::read_to_string(&target) {
                Ok(text) if is_page => anchor.is_empty() || anchors(&text).contains(anchor),
                _ => target.exists(),
            };
            checked += 1;
            if !is_there {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(checked > 200, "{checked}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_tests_that_pages_run_by_name_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut all, mut missing, mut checked) = (Vec::new(), Vec::new(), 0);
    pages(&root, &mut all);
    for path in &all {
        let page = fs::read_to_string(path).unwrap();
        let commands = page.split("cargo test -p ").skip(1).filter_map(|rest| rest.split(['\n', '`']).next());
        for (options, filter) in commands.filter_map(|command| command.split_once(" -- ")) {
            let package = options.split(' ').next().unwrap();
            let filter = filter.split(' ').next().unwrap().trim_end_matches("::");
            let name = filter.rsplit("::").next().unwrap();
            let (module, mut is_there) = (format!("mod {name};"), false);
            for folder in ["crates", "examples"].map(|folder| root.join(folder).join(package)) {
                if folder.is_dir() {
                    sources(&folder, &mut |text| {
                        let mut functions =
                            text.split("fn ").skip(1).filter_map(|rest| rest.split('(').next());
                        is_there |=
                            text.contains(&module) || functions.any(|function| function.contains(name));
                    });
                }
            }
            checked += 1;
            if !is_there {
                missing.push(format!("{}: {package} has no tests {filter}", path.display()));
            }
        }
    }
    assert!(checked > 15, "{checked}");
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn the_fault_matrix_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = String::new();
    for folder in ["crates", "python/tests", "tch/tests"] {
        sources(&root.join(folder), &mut |text| all += text);
    }
    let page = fs::read_to_string(root.join("docs/failure.md")).unwrap();
    let (_, matrix) = page.split_once("\n| fault | ").unwrap();
    let rows = matrix.lines().skip(2).take_while(|line| line.starts_with('|'));
    let (mut checked, mut missing) = (0, Vec::new());
    for row in rows {
        let tests = row.trim_end_matches('|').rsplit('|').next().unwrap();
        for name in tests.split('`').skip(1).step_by(2) {
            let is_there = if name.contains('/') {
                // A script, perhaps with a part of it.
                root.join(name.split(' ').next().unwrap()).exists()
            } else {
                let test = name.rsplit("::").next().unwrap();
                // Of a long name the beginning.
                let (begin, end) = test.strip_suffix("..").map_or((test, true), |begin| (begin, false));
                let is = |before: &str, after: &str| {
                    all.contains(&format!("{before}{begin}{}", if end { after } else { "" }))
                };
                is("fn ", "(") || is("def ", "(") || is("\"", "\"") || is("mod ", ";")
            };
            let is_a_package = || root.join("crates").join(name).exists() || name == "phalanx-tch";
            let is_a_program = || root.join("crates/phalanx/tests").join(name).exists();
            checked += 1;
            if !is_there && !is_a_package() && !is_a_program() {
                missing.push(format!("{name} in {row}"));
            }
        }
    }
    assert!(checked > 100, "{checked}");
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn the_book_has_every_page_once() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let mut listed: Vec<PathBuf> = links(&summary).into_iter().map(|link| docs.join(link)).collect();
    let mut found = Vec::new();
    pages(&docs, &mut found);
    found.retain(|page| !page.ends_with("SUMMARY.md"));
    listed.sort();
    found.sort();
    assert_eq!(listed, found);
}
