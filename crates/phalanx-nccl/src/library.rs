//! Shared libraries that are opened at run time, and tables of their functions.
//!
//! The functions are declared by hand: there are few of them, and all have kept their signatures since CUDA 11 and NCCL 2.18, which is older than what is accepted.
//! A crate of generated bindings such as cudarc asks for the version of CUDA when it is compiled, and ends the program where a
//! library is missing; here that is an error like any other.

use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::path::PathBuf;

use libloading::Library;
use phalanx::{Error, Result};

/// A library that stays open until the process ends: its threads, and what it has on the device, may outlive every handle.
pub(crate) struct Opened {
    library: ManuallyDrop<Library>,
    /// What it was opened as.
    pub name: PathBuf,
}

/// Opens the library at the path in `variable`, or else the first of `names` that the system's loader finds.
pub(crate) fn open(variable: &str, names: &[&str]) -> Result<Opened> {
    let chosen = std::env::var_os(variable).filter(|path| !path.is_empty());
    let candidates: Vec<OsString> = match &chosen {
        Some(path) => vec![path.clone()],
        None => names.iter().map(OsString::from).collect(),
    };
    let mut refused = Vec::new();
    for name in candidates {
        // SAFETY: the initialisers of these two libraries have no conditions of their own: every program that is linked with
        // them runs them at its start. Whoever sets the variable names a program that he lets run.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok(Opened { library: ManuallyDrop::new(library), name: name.into() }),
            Err(error) => refused.push(whole(&error)),
        }
    }
    let library = names.first().copied().unwrap_or_default();
    let remedy = match chosen {
        Some(_) => format!("does {variable} name a {library} for this machine?"),
        None => format!("install it, or name the file with {variable}"),
    };
    Err(Error::environment(format!("{library} cannot be opened: {}", refused.join("; "))).with_remedy(remedy))
}

impl Opened {
    /// The function `name`.
    ///
    /// # Safety
    /// `F` is the type of a pointer to it.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller says that the type is right, and the library is never closed.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|error| {
            Error::environment(format!("{} has no {name}: {}", self.name.display(), whole(&error)))
                .with_remedy("it is too old, or another library of the same name")
        })
    }
}

/// An error with what the loader has said.
fn whole(error: &dyn std::error::Error) -> String {
    let source = error.source().map_or(String::new(), |source| format!(": {source}"));
    format!("{error}{source}")
}

/// A table of a library's functions.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $(fn $name:ident($($argument:ty),* $(,)?) $(-> $output:ty)?;)* }) => {
        $(#[$doc])*
        #[expect(non_snake_case, reason = "the functions have the names that their library gives them")]
        pub(crate) struct $table {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $output)?,)*
        }

        impl $table {
            pub(crate) fn load(library: &$crate::library::Opened) -> phalanx::Result<Self> {
                Ok(Self {
                    // SAFETY: the types are those of the library's header.
                    $($name: unsafe { library.function(stringify!($name)) }?,)*
                })
            }
        }
    };
}
pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_variable_for_it() {
        let error = open("NO_SUCH_VARIABLE", &["libnosuchlibrary.so.7"]).err().unwrap();
        assert!(error.is_environment(), "{error}");
        let text = error.to_string();
        assert!(text.contains("libnosuchlibrary.so.7 cannot be opened"), "{text}");
        assert!(text.contains("No such file or directory"), "{text}");
        assert!(text.contains("NO_SUCH_VARIABLE"), "{text}");
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let libc = open("NO_SUCH_VARIABLE", &["libc.so.6"]).unwrap();
        // SAFETY: nothing is called.
        let error = unsafe { libc.function::<unsafe extern "C" fn()>("ncclAllReduce") }.err().unwrap();
        assert!(error.to_string().contains("has no ncclAllReduce"), "{error}");
    }
}
