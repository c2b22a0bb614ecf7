//! `phalanx init`.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use crate::output::print;

/// Make a small crate that trains a model of Burn in two processes, or such a program in Python
///
/// It is a folder with the name of the crate: the manifest, a program, a test that two ranks learn, and a README. `cargo run`
/// trains there. With `--python` it has a program in Python, its requirements, a test and a README.
#[derive(Args, Debug)]
pub(crate) struct Init {
    /// The name of the crate or program, and of the folder, which is made here; it must not exist, or be empty
    #[arg(value_name = "NAME")]
    name: String,

    /// Depend on Phalanx in this checkout of it, instead of the published packages of this command's version
    #[arg(long, value_name = "CHECKOUT")]
    path: Option<PathBuf>,

    /// Write a program in Python instead of a crate: with PyTorch's DistributedDataParallel, or with NumPy's arrays
    #[arg(long, value_enum, value_name = "LIBRARY", num_args = 0..=1, require_equals = true, default_missing_value = "torch")]
    python: Option<Library>,
}

/// What a program in Python computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Library {
    Torch,
    Numpy,
}

/// Files of a folder, and what is in them.
type Files = [(&'static str, &'static str)];

/// What the crate has, and where.
const CRATE: [(&str, &str); 5] = [
    ("Cargo.toml", include_str!("../templates/init/Cargo.toml.in")),
    ("src/main.rs", include_str!("../templates/init/main.rs")),
    ("tests/train.rs", include_str!("../templates/init/test.rs")),
    ("README.md", include_str!("../templates/init/README.md")),
    (".gitignore", include_str!("../templates/init/gitignore")),
];

/// What a program in Python has beside `train.py`.
const PYTHON: [(&str, &str); 4] = [
    ("requirements.txt", include_str!("../templates/init/python/requirements.txt")),
    ("test_train.py", include_str!("../templates/init/python/test_train.py")),
    ("README.md", include_str!("../templates/init/python/README.md")),
    (".gitignore", include_str!("../templates/init/python/gitignore")),
];

/// Rust's keywords, which Cargo accepts as no name.
const KEYWORDS: &str = "Self abstract as async await become box break const continue crate do dyn else enum extern false final fn \
    for gen if impl in let loop macro match mod move mut override priv pub ref return self static struct super trait true try type \
    typeof unsafe unsized use virtual where while yield";

/// Names that the crate's dependencies have, or Rust and Cargo themselves.
const TAKEN: [&str; 12] = [
    "burn",
    "phalanx",
    "phalanx-burn",
    "alloc",
    "core",
    "proc_macro",
    "std",
    "test",
    // Folders beside the programs that Cargo builds.
    "build",
    "deps",
    "examples",
    "incremental",
];

/// The longest name that crates.io takes.
const LENGTH_LIMIT: usize = 64;

pub(crate) fn run(options: &Init) -> ExitCode {
    let said = make(Path::new(""), options).and_then(|()| {
        let here = std::env::current_dir().ok().filter(|_| options.python.is_none());
        let workspace = here.and_then(|here| workspace_around(&here));
        let note = workspace.map_or_else(String::new, |manifest| in_workspace(&options.name, &manifest));
        print((made(options) + &note).as_bytes())
    });
    match said {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "phalanx: {message}");
            ExitCode::FAILURE
        }
    }
}

/// What was made, and what to do with it.
fn made(options: &Init) -> String {
    let Init { name, path, python } = options;
    let (start, test, packages) = match python {
        None => ("cargo run", "cargo test", "crates.io"),
        Some(_) => (
            "pip install -r requirements.txt && phalanx run --nproc-per-node 2 -- python3 train.py",
            "python3 -m unittest",
            "PyPI",
        ),
    };
    let mut text =
        format!("made {name}: `cd {name} && {start}` trains in two processes, and `{test}` checks it\n");
    if path.is_none() {
        let version = env!("CARGO_PKG_VERSION");
        text += &format!(
            "It takes Phalanx {version} from {packages}; with --path CHECKOUT it would take a checkout's.\n"
        );
    }
    text
}

/// The manifest of the workspace that Cargo finds from `folder` upwards.
fn workspace_around(folder: &Path) -> Option<PathBuf> {
    let has_workspace = |text: String| text.lines().any(|line| line.trim_start().starts_with("[workspace"));
    let mut manifests = folder.ancestors().map(|above| above.join("Cargo.toml"));
    manifests.find(|manifest| fs::read_to_string(manifest).is_ok_and(has_workspace))
}

/// Cargo builds no crate in a workspace's folder that is not one of its members.
fn in_workspace(name: &str, manifest: &Path) -> String {
    format!(
        "{} has a workspace: unless {name} is among its members, add it there, or add the line [workspace] to {name}/Cargo.toml\n",
        manifest.display()
    )
}

/// Makes the folder in `place`.
fn make(place: &Path, options: &Init) -> Result<(), String> {
    let path = options.path.as_deref();
    match options.python {
        None => {
            check_crate_name(&options.name)?;
            let (phalanx, burn) = (dependency("phalanx", path)?, dependency("phalanx-burn", path)?);
            let filled = [
                ("{{rust}}", env!("CARGO_PKG_RUST_VERSION")),
                ("{{phalanx}}", &phalanx),
                ("{{phalanx-burn}}", &burn),
            ];
            write(place, &options.name, &CRATE, &filled)
        }
        Some(library) => {
            check_name(&options.name)?;
            let requirement = requirement(library, path)?;
            // PyTorch's `init_process_group` knows the variables of torchrun alone.
            let (program, whose, launchers) = match library {
                Library::Torch => (
                    include_str!("../templates/init/python/torch.py"),
                    "PyTorch's `DistributedDataParallel`",
                    "torchrun starts",
                ),
                Library::Numpy => (
                    include_str!("../templates/init/python/numpy.py"),
                    "NumPy",
                    "torchrun, mpirun and srun start",
                ),
            };
            let files = [&[("train.py", program)], &PYTHON[..]].concat();
            let filled = [
                ("{{requirement}}", requirement.as_str()),
                ("{{library}}", whose),
                ("{{launchers}}", launchers),
            ];
            write(place, &options.name, &files, &filled)
        }
    }
}

/// Writes the files into the folder, with a value for each name in braces.
fn write(place: &Path, name: &str, files: &Files, filled: &[(&str, &str)]) -> Result<(), String> {
    let folder = place.join(name);
    check_folder(name, &folder)?;
    files.iter().try_for_each(|(file, template)| {
        let text = template.replace("{{name}}", name);
        let text = filled.iter().fold(text, |text, (key, value)| text.replace(key, value));
        let file = folder.join(file);
        let written = file.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&file, text));
        written.map_err(|error| format!("{} cannot be written: {error}", file.display()))
    })
}

fn check_name(name: &str) -> Result<(), String> {
    let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
    let why = if !name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        "it must begin with a letter"
    } else if !name.chars().all(letters) {
        "only letters, digits, - and _ of ASCII may be in it"
    } else if name.len() > LENGTH_LIMIT {
        "it is longer than 64 letters"
    } else {
        return Ok(());
    };
    Err(no_name(name, why))
}

fn check_crate_name(name: &str) -> Result<(), String> {
    check_name(name)?;
    let why = if KEYWORDS.split(' ').any(|keyword| keyword == name) {
        "it is a keyword of Rust"
    } else if TAKEN.iter().any(|taken| taken.replace('-', "_") == name.replace('-', "_")) {
        "Rust, Cargo or a dependency of the crate has it"
    } else {
        return Ok(());
    };
    Err(no_name(name, why))
}

fn no_name(name: &str, why: &str) -> String {
    format!("{name:?} is no name for this folder: {why}; give another, such as my-training")
}

fn check_folder(name: &str, folder: &Path) -> Result<(), String> {
    match fs::read_dir(folder).map(|mut files| files.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err(format!("the folder {name} has files already: give another name, or empty it first"))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            Err(format!("{name} exists and is no folder: give another name"))
        }
        Err(error) => Err(format!("the folder {name} cannot be read: {error}")),
    }
}

/// What the manifest says of a package of ours.
fn dependency(package: &str, checkout: Option<&Path>) -> Result<String, String> {
    let Some(checkout) = checkout else {
        return Ok(format!("{:?}", env!("CARGO_PKG_VERSION")));
    };
    let folder = folder_of(checkout, &format!("crates/{package}"))?;
    // A literal string of TOML, in which nothing has a meaning but its end.
    match folder.to_str().filter(|path| !path.contains(|letter: char| letter == '\'' || letter.is_control()))
    {
        Some(path) => Ok(format!("{{ path = '{path}' }}")),
        None => Err(format!(
            "{folder:?} cannot be written into a manifest: move the checkout to a folder with a simpler name"
        )),
    }
}

/// What pip is to install.
fn requirement(library: Library, checkout: Option<&Path>) -> Result<String, String> {
    let extra = match library {
        Library::Torch => "torch",
        Library::Numpy => "numpy",
    };
    let Some(checkout) = checkout else {
        return Ok(format!("phalanx-torch[{extra}]=={}", env!("CARGO_PKG_VERSION")));
    };
    // An address, in which other bytes than these stand as their numbers.
    let mut address = format!("phalanx-torch[{extra}] @ file://");
    for byte in folder_of(checkout, "python")?.into_os_string().into_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte) {
            address.push(char::from(byte));
        } else {
            address += &format!("%{byte:02X}");
        }
    }
    Ok(address)
}

/// Where a package of the checkout lies.
fn folder_of(checkout: &Path, package: &str) -> Result<PathBuf, String> {
    let folder = checkout.join(package);
    let found = folder.join("Cargo.toml").is_file().then(|| folder.canonicalize().ok()).flatten();
    found.ok_or_else(|| {
        format!(
            "{} is no checkout of Phalanx: it has no {package}; give the folder with its README.md",
            checkout.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn init(name: &str, path: Option<&Path>) -> Init {
        Init { name: name.to_owned(), path: path.map(Path::to_owned), python: None }
    }

    fn python(name: &str, path: Option<&Path>, library: Library) -> Init {
        Init { python: Some(library), ..init(name, path) }
    }

    #[test]
    fn what_is_no_name_of_a_crate_is_refused_with_the_reason() {
        for name in ["digits", "my-training", "a1_b"] {
            assert_eq!(check_crate_name(name), Ok(()));
        }
        let long = "a".repeat(65);
        for (name, why) in [
            ("", "begin with a letter"),
            ("1st", "begin with a letter"),
            ("-x", "begin with a letter"),
            ("../up", "begin with a letter"),
            ("a/b", "only letters"),
            ("zoë", "only letters"),
            ("a b", "only letters"),
            (&long, "longer than 64"),
            ("async", "keyword"),
            ("phalanx_burn", "a dependency"),
            ("test", "Cargo"),
            ("examples", "Cargo"),
            ("incremental", "Cargo"),
        ] {
            let error = check_crate_name(name).unwrap_err();
            assert!(error.contains(why) && error.contains("give another"), "{name}: {error}");
        }
    }

    #[test]
    fn a_crate_depends_on_the_published_version_or_on_a_checkout() {
        let place = tempfile::tempdir().unwrap();
        make(place.path(), &init("digits", None)).unwrap();
        let manifest = fs::read_to_string(place.path().join("digits/Cargo.toml")).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        for line in [format!("phalanx = \"{version}\""), format!("phalanx-burn = \"{version}\"")] {
            assert!(manifest.lines().any(|found| found == line), "{manifest}");
        }

        let error = make(place.path(), &init("other", Some(place.path()))).unwrap_err();
        assert!(error.contains("is no checkout of Phalanx"), "{error}");
        assert!(!place.path().join("other").exists());
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        make(place.path(), &init("other", Some(&checkout))).unwrap();
        let manifest = fs::read_to_string(place.path().join("other/Cargo.toml")).unwrap();
        let folder = checkout.canonicalize().unwrap().join("crates/phalanx-burn");
        assert!(
            manifest.contains(&format!("phalanx-burn = {{ path = '{}' }}", folder.display())),
            "{manifest}"
        );
    }

    #[test]
    fn what_is_typed_next_is_said_with_where_packages_come_from() {
        let text = made(&init("digits", None));
        assert!(text.contains("`cd digits && cargo run`") && text.contains("from crates.io"), "{text}");
        let text = made(&python("digits", None, Library::Torch));
        assert!(
            text.contains("pip install -r requirements.txt && phalanx run") && text.contains("from PyPI"),
            "{text}"
        );
        assert_eq!(made(&init("digits", Some(Path::new(".")))).lines().count(), 1);
    }

    #[test]
    fn a_crate_within_a_workspace_is_told_of_it() {
        let place = tempfile::tempdir().unwrap();
        let (manifest, below) = (place.path().join("Cargo.toml"), place.path().join("a/b"));
        fs::create_dir_all(&below).unwrap();
        fs::write(&manifest, "[package]\nname = \"x\"\n").unwrap();
        assert_ne!(workspace_around(&below).as_ref(), Some(&manifest), "a crate alone");
        fs::write(&manifest, "[workspace]\nmembers = []\n").unwrap();
        assert_eq!(workspace_around(&below).as_ref(), Some(&manifest));
        assert_eq!(workspace_around(place.path()).as_ref(), Some(&manifest));
        let text = in_workspace("digits", &manifest);
        assert!(text.contains("the line [workspace] to digits/Cargo.toml") && text.ends_with('\n'), "{text}");
    }

    #[test]
    fn nothing_is_left_to_fill_in_and_nothing_is_overwritten() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("digits")).unwrap(); // empty: accepted
        make(place.path(), &init("digits", None)).unwrap();
        for (file, _) in CRATE {
            let text = fs::read_to_string(place.path().join("digits").join(file)).unwrap();
            assert!(!text.contains("{{"), "{file}: {text}");
        }
        let error = make(place.path(), &init("digits", None)).unwrap_err();
        assert_eq!(error, "the folder digits has files already: give another name, or empty it first");
        fs::write(place.path().join("file"), "").unwrap();
        let error = make(place.path(), &init("file", None)).unwrap_err();
        assert_eq!(error, "file exists and is no folder: give another name");
    }

    #[test]
    fn a_program_in_python_names_what_it_needs() {
        let place = tempfile::tempdir().unwrap();
        let version = env!("CARGO_PKG_VERSION");
        for (name, library, extra) in
            [("async", Library::Torch, "torch"), ("arrays", Library::Numpy, "numpy")]
        {
            make(place.path(), &python(name, None, library)).unwrap();
            let folder = place.path().join(name);
            let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
            assert_eq!(read("requirements.txt"), format!("phalanx-torch[{extra}]=={version}\n"));
            assert!(
                read("README.md").starts_with(&format!("# {name}\n")) && read(".gitignore").contains(".venv")
            );
            // The program with PyTorch ends by itself under mpirun and srun.
            assert!(read("README.md").contains("torchrun"));
            assert_eq!(read("README.md").contains("mpirun and srun"), library == Library::Numpy);
            for file in ["train.py", "test_train.py", "README.md"] {
                assert!(!read(file).contains("{{"), "{file}: {}", read(file));
            }
        }
        let error = make(place.path(), &python("../up", None, Library::Torch)).unwrap_err();
        assert!(error.contains("begin with a letter"), "{error}");
    }

    #[test]
    #[ignore = "needs python3: .ci/full runs it"]
    fn a_program_in_python_compiles() {
        let place = tempfile::tempdir().unwrap();
        for (name, library) in [("tensors", Library::Torch), ("arrays", Library::Numpy)] {
            make(place.path(), &python(name, None, library)).unwrap();
            let compiled = Command::new("python3")
                .args(["-m", "py_compile", "train.py", "test_train.py"])
                .current_dir(place.path().join(name))
                .output()
                .unwrap();
            assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        }
    }

    #[test]
    fn a_program_in_python_installs_the_package_of_a_checkout() {
        let place = tempfile::tempdir().unwrap();
        let checkout = place.path().join("a checkout");
        let error = make(place.path(), &python("digits", Some(&checkout), Library::Numpy)).unwrap_err();
        assert!(error.contains("is no checkout of Phalanx: it has no python"), "{error}");
        fs::create_dir_all(checkout.join("python")).unwrap();
        fs::write(checkout.join("python/Cargo.toml"), "").unwrap();
        make(place.path(), &python("digits", Some(&checkout), Library::Numpy)).unwrap();
        let requirements = fs::read_to_string(place.path().join("digits/requirements.txt")).unwrap();
        assert!(
            requirements.starts_with("phalanx-torch[numpy] @ file:///")
                && requirements.ends_with("/a%20checkout/python\n"),
            "{requirements}"
        );
    }

    #[test]
    fn burn_is_what_the_first_page_asks_for() {
        let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).unwrap();
        let line = CRATE[0].1.lines().find(|line| line.starts_with("burn = ")).unwrap();
        assert!(page.contains(line), "{line}");
    }
}
