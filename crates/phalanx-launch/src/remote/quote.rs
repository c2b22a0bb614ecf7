//! Quotes words for a shell: pure.

/// `word` as one word of a POSIX shell's command line, for any content without a zero byte, which a command line cannot
/// have.
pub(super) fn quote(word: &[u8]) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(word.len() + 2);
    quoted.push(b'\'');
    for &byte in word {
        match byte {
            // Between single quotes only the quote itself is special.
            b'\'' => quoted.extend_from_slice(br"'\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    /// What a real shell makes of `words` when each is quoted.
    fn through_a_shell(words: &[Vec<u8>]) -> Vec<u8> {
        let mut line = br"printf '%s\0'".to_vec();
        for word in words {
            line.push(b' ');
            line.extend_from_slice(&quote(word));
        }
        Command::new("sh").arg("-c").arg(OsStr::from_bytes(&line)).output().unwrap().stdout
    }

    fn ended(words: &[Vec<u8>]) -> Vec<u8> {
        words.iter().flat_map(|word| word.iter().copied().chain([0])).collect()
    }

    #[test]
    fn what_shells_like_to_touch_stays_as_it_is() {
        let words: Vec<Vec<u8>> = [
            "", "a b", "'", "''", "\\", "\\'", "$HOME", "`id`", "$(id)", "!1", "*", "~", "\n", "-n", "#",
            "\"", "\t;&|<>",
        ]
        .map(|word| word.as_bytes().to_vec())
        .to_vec();
        assert_eq!(through_a_shell(&words), ended(&words));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_words_come_through_a_real_shell(
            words in proptest::collection::vec(proptest::collection::vec(1..=255_u8, 0..40), 1..20),
        ) {
            prop_assert_eq!(through_a_shell(&words), ended(&words));
        }
    }
}
