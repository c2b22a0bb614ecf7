//! Reads the command line: clap's parsing, with what our variables need, and errors that say what to do.

use std::any::TypeId;
use std::error::Error as StdError;
use std::ffi::{OsStr, OsString};
use std::net::AddrParseError;
use std::num::ParseIntError;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches};

use crate::cli::Cli;

/// Options of torchrun that are not here, with what there is in their place.
const OF_TORCHRUN: [(&str, &str); 11] = [
    ("--duplicate-stderr-filters", "filter the files of --tee 2"),
    ("--duplicate-stdout-filters", "filter the files of --tee 1"),
    ("--event-log-handler", "give --log-format json"),
    ("--logs-specs", "give --log-dir, and --tee or --redirects"),
    ("--numa-binding", "start the program by numactl"),
    ("--print-completion", "call `phalanx completions`"),
    ("--run-path", "start the program by python"),
    ("--shutdown-timeout", "give --grace-period"),
    ("--signals-to-handle", "leave it out"),
    ("--start-method", "leave it out"),
    ("--virtual-local-rank", "leave it out"),
];

/// What there is in place of `option`, if it is one of these.
fn instead_of_torchruns(option: &str) -> Option<&'static str> {
    let option = option.replace('_', "-");
    OF_TORCHRUN.iter().find(|(name, _)| *name == option).map(|(_, instead)| *instead)
}

/// What switches off, as a variable's value.
const OFF: [&str; 6] = ["0", "false", "f", "no", "n", "off"];

/// Notes about torchrun's variables for those options.
pub(crate) fn unused_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Vec<String> {
    let is_off = |value: &OsStr| value.is_empty() || OFF.iter().any(|off| value.eq_ignore_ascii_case(off));
    let notes = OF_TORCHRUN.iter().filter_map(|(option, instead)| {
        let variable = format!("PET{}", option.replacen('-', "", 1).replace('-', "_").to_uppercase());
        let value = lookup(&variable).filter(|value| !is_off(value))?;
        Some(format!(
            "{variable}={} has no effect: {option} of torchrun is not here: {instead}",
            value.display()
        ))
    });
    notes.collect()
}

/// Reads a command line. An empty variable counts as not set, and an error about a variable's value names the variable.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    parse_with(words, |name| std::env::var_os(name))
}

fn parse_with(
    words: impl IntoIterator<Item = OsString>,
    lookup: impl Fn(&OsStr) -> Option<OsString>,
) -> Result<Cli, clap::Error> {
    let words: Vec<OsString> = words.into_iter().collect();
    let names: Vec<String> =
        Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let unset = |arg: Arg| match arg.get_env() {
        Some(name) if lookup(name).is_some_and(|value| says_nothing(&arg, &value)) => {
            arg.env(Resettable::Reset)
        }
        _ => arg,
    };
    // The error is then about the value, and not about an option that is a number.
    let negative = |arg: Arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    let prepared = |arg: Arg| negative(unset(arg));
    let command = Cli::command();
    let mut command = names
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, |part| part.mut_args(&prepared)));
    let parsed = command.try_get_matches_from_mut(&words).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|mut error| {
        let given = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        let unknown = given(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument);
        let value = given(ContextKind::InvalidValue);
        let option = given(ContextKind::InvalidArg);
        let option = option.as_deref().and_then(long_name);
        let args = || command.get_subcommands().flat_map(Command::get_arguments);
        let variable = args()
            .filter(|arg| arg.get_long().is_some_and(|long| option == Some(long)))
            .filter_map(|arg| arg.get_env())
            .find(|name| lookup(name).is_some_and(|set| Some(&*set.to_string_lossy()) == value.as_deref()));
        let mut tips: Vec<String> = variable
            .map(|variable| format!("the value is that of the variable {}", variable.display()))
            .into_iter()
            .collect();
        if error.kind() == ErrorKind::InvalidUtf8 {
            let used = words.get(1).and_then(|name| command.find_subcommand(name));
            tips.extend(used.and_then(|used| not_text(used, &words, &lookup)));
        }
        let source = StdError::source(&error);
        if source.is_some_and(|source| source.is::<ParseIntError>()) {
            tips.push("give a whole number".to_owned());
        }
        if source.is_some_and(|source| source.is::<AddrParseError>()) {
            tips.push("give an IP address, such as 10.0.0.5".to_owned());
        }
        let is_missing = |option: &str| named(&error).iter().any(|named| long_name(named) == Some(option));
        if error.kind() == ErrorKind::MissingRequiredArgument && is_missing("num-proc") {
            tips.push("the number of workers is written -np N, or --nproc-per-node N".to_owned());
        }
        if error.kind() == ErrorKind::ArgumentConflict {
            for option in named(&error) {
                let is_it = |arg: &&Arg| arg.get_long().is_some_and(|long| long_name(&option) == Some(long));
                let arg = args().filter(is_it).find(|arg| !is_typed(arg, &words));
                let variable = arg.and_then(Arg::get_env).filter(|name| lookup(name).is_some());
                tips.extend(variable.map(|variable| {
                    format!(
                        "{option} comes from the variable {}: unset it, or leave out the other option",
                        variable.display()
                    )
                }));
            }
        }
        if error.kind() == ErrorKind::UnknownArgument {
            // That a program of this name could be meant.
            error.remove(ContextKind::Suggested);
        }
        if !tips.is_empty() {
            let tips = tips.into_iter().map(Into::into).collect();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
        if let Some(instead) = unknown.as_deref().and_then(instead_of_torchruns) {
            // Options that are spelled alike are others.
            error.remove(ContextKind::SuggestedArg);
            let tip = format!("this option of torchrun is not here: {instead}");
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        error
    })
}

/// Whether `value`, of the variable of `arg`, is as if the variable were not set. A switch that is off excludes no other option.
fn says_nothing(arg: &Arg, value: &OsStr) -> bool {
    let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
    value.is_empty() || is_switch && OFF.iter().any(|off| value.eq_ignore_ascii_case(off))
}

/// Which value of `command` is not UTF-8, of those that must be: clap does not say.
fn not_text(
    command: &Command,
    words: &[OsString],
    lookup: impl Fn(&OsStr) -> Option<OsString>,
) -> Option<String> {
    let is_bad = |value: &OsStr| value.to_str().is_none();
    let (paths, texts): (Vec<&Arg>, Vec<&Arg>) = command.get_arguments().partition(|arg| {
        let kind = arg.get_value_parser().type_id();
        kind == TypeId::of::<OsString>() || kind == TypeId::of::<PathBuf>()
    });
    let of_a_path = |at: usize| paths.iter().any(|arg| is_typed(arg, &words[at.saturating_sub(1)..=at]));
    let variable = texts.into_iter().filter(|arg| !is_typed(arg, words)).find_map(|arg| {
        let name = arg.get_env()?;
        let value = lookup(name).filter(|value| is_bad(value))?;
        Some(format!("the variable {} is not UTF-8: {}", name.display(), value.display()))
    });
    variable.or_else(|| {
        let (_, word) = words.iter().enumerate().find(|(at, word)| is_bad(word) && !of_a_path(*at))?;
        Some(format!("this is not UTF-8: {}", word.display()))
    })
}

/// The name in `--nnodes <N>`.
fn long_name(option: &str) -> Option<&str> {
    option.strip_prefix("--")?.split(' ').next()
}

/// The options that an error names, each with its value: `--nnodes <N>`.
fn named(error: &clap::Error) -> Vec<String> {
    let of_kind = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    };
    [of_kind(ContextKind::InvalidArg), of_kind(ContextKind::PriorArg)].concat()
}

/// Whether `arg` is among the words of the command line, by any of its names.
fn is_typed(arg: &Arg, words: &[OsString]) -> bool {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    let longs: Vec<String> =
        arg.get_long().into_iter().chain(aliases).map(|long| format!("--{long}")).collect();
    let short = arg.get_short().map(|short| format!("-{short}"));
    words.iter().map(|word| word.to_string_lossy()).any(|word| {
        let name = word.split_once('=').map_or(&*word, |(name, _)| name);
        longs.iter().any(|long| long == name) || short.as_ref().is_some_and(|short| word.starts_with(short))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn what_is_no_number_is_an_error_about_the_value_with_what_to_do() {
        let refused = |options: &[&str]| {
            let words = [&["phalanx", "run"], options, &["./train"]].concat();
            parse_with(words.into_iter().map(OsString::from), |_| None).unwrap_err().to_string()
        };
        let error = refused(&["--nproc-per-node", "-1"]);
        assert!(
            error.contains("'-1' for '--nproc-per-node <N>': give a number of workers from 1"),
            "{error}"
        );
        let error = refused(&["--max-restarts", "-1"]);
        assert!(error.contains("'-1' for '--max-restarts <N>'") && !error.contains("-- -1"), "{error}");
        let error = refused(&["--max-restarts", "many"]);
        assert!(error.contains("tip: give a whole number"), "{error}");
        let error = refused(&["--bind", "eth0"]);
        assert!(error.contains("tip: give an IP address"), "{error}");
        let error = refused(&["-n", "2"]);
        assert!(error.contains("tip: the number of workers is written -np N"), "{error}");
        let error = refused(&["-c", "2"]);
        assert!(error.contains("unexpected argument '-c'") && !error.contains("-- -c"), "{error}");
    }

    #[test]
    fn options_of_torchrun_that_are_not_here_are_refused_with_what_to_do() {
        let refused = |option: &str| {
            let words = ["phalanx", "run", option, "./train"].map(OsString::from);
            parse_with(words, |_| None).unwrap_err().to_string()
        };
        for option in ["--start-method", "--start_method=spawn"] {
            let error = refused(option);
            assert!(error.contains("option of torchrun is not here: leave it out"), "{error}");
            assert!(!error.contains("--start-timeout"), "{error}");
        }
        assert!(refused("--shutdown-timeout=3").contains("give --grace-period"));
        assert!(!refused("--nproc-per-nod=2").contains("torchrun"));
        // The page names the same.
        let page = include_str!("../../../docs/guide/launching.md");
        for (option, _) in OF_TORCHRUN {
            assert!(page.contains(&format!("`{option}`")), "{option}");
        }
    }

    #[test]
    fn their_variables_are_said_to_have_no_effect() {
        let notes = |name: &'static str, value: &str| {
            unused_variables(|variable| (variable == name).then(|| OsString::from(value)))
        };
        assert_eq!(
            notes("PET_NUMA_BINDING", "node"),
            [
                "PET_NUMA_BINDING=node has no effect: --numa-binding of torchrun is not here: start the program by numactl"
            ]
        );
        for (name, value) in [("PET_VIRTUAL_LOCAL_RANK", "False"), ("PET_RUN_PATH", ""), ("PET_ROLE", "x")] {
            assert!(notes(name, value).is_empty(), "{name}");
        }
    }

    #[test]
    fn a_value_that_is_not_utf_8_is_named() {
        let bad = |text: &str| OsString::from_vec([text.as_bytes(), b"\xff"].concat());
        let words = |options: &[OsString]| {
            let first = ["phalanx", "run"].map(OsString::from);
            let last = ["./train".into(), bad("--lr")];
            [&first[..], options, &last[..]].concat()
        };
        let refused = |options: &[OsString]| parse_with(words(options), |_| None).unwrap_err().to_string();
        let said = "this is not UTF-8: trainer\u{fffd}";
        assert!(refused(&["--log-dir".into(), bad("x"), "--role".into(), bad("trainer")]).contains(said));
        assert!(refused(&[bad("--log-dir="), "-t".into(), bad("trainer")]).contains(said));
        let error = refused(&[bad("--role=trainer")]);
        assert!(error.contains("this is not UTF-8: --role=trainer\u{fffd}"), "{error}");
        let lookup = |name: &OsStr| (name == "PHALANX_LOG_FORMAT").then(|| bad("json"));
        let options = ["--log-format".into(), bad("json")];
        let error = parse_with(words(&options), lookup).unwrap_err().to_string();
        assert!(error.contains("that of the variable PHALANX_LOG_FORMAT"), "{error}");
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        for variable in ["PET_ROLE", "PET_NNODES", "PET_STANDALONE"] {
            let found = not_text(run, &words(&[]), |name| (name == variable).then(|| bad("x")));
            assert_eq!(found, Some(format!("the variable {variable} is not UTF-8: x\u{fffd}")));
        }
    }

    #[test]
    fn an_empty_variable_is_not_set_and_a_bad_one_is_named() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let lookup = |value: &'static str| {
            move |name: &OsStr| {
                (name == "PET_NNODES" || name == "PET_MAX_RESTARTS").then(|| OsString::from(value))
            }
        };
        assert!(parse_with(words("phalanx run ./train"), lookup("")).is_ok());
        let error = parse_with(words("phalanx run --nnodes x ./train"), lookup("x")).unwrap_err().to_string();
        assert!(error.contains("'--nnodes <N>'") && error.contains("the variable PET_NNODES"), "{error}");
        let error = parse_with(words("phalanx run --nnodes y ./train"), lookup("x")).unwrap_err().to_string();
        assert!(!error.contains("PET_NNODES"), "{error}");
    }
}
