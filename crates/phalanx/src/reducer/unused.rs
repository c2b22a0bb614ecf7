//! Errors and warnings about unused parameters, which get no gradient in a step.

use super::ParameterSpec;
use crate::error::Error;
use crate::notice::warn;
use crate::rank::Rank;

/// Names that a message lists before it only counts.
const NAMES: usize = 16;

/// The error of a step in which the parameters `unused` got no gradient.
pub(super) fn error(rank: Rank, parameters: &[ParameterSpec], unused: &[usize]) -> Error {
    Error::invalid_argument(format!(
        "rank {rank}: backward gave no gradient to {} of {} parameters: {}",
        unused.len(),
        parameters.len(),
        names(parameters, unused)
    ))
    .with_remedy("let every parameter take part in the loss on every rank, or set find_unused_parameters")
}

/// Warns of each parameter once, however often it is unused.
pub(super) struct Warnings {
    warned: Vec<bool>,
    /// Whether any step has been looked at.
    began: bool,
}

impl Warnings {
    pub(super) fn new(parameters: usize) -> Self {
        Self { warned: vec![false; parameters], began: false }
    }

    /// A step is over: `unused` got no gradient on this `rank`, and `used` says which got one on any.
    pub(super) fn step(&mut self, rank: Rank, parameters: &[ParameterSpec], unused: &[usize], used: &[bool]) {
        let (elsewhere, nowhere): (Vec<usize>, Vec<usize>) = unused
            .iter()
            .filter(|&&index| !std::mem::replace(&mut self.warned[index], true))
            .partition(|&&index| used[index]);
        // Every rank knows what no rank uses; one of them says it.
        if !nowhere.is_empty() && rank.is_main() {
            warn(format_args!(
                "no rank uses {} of {} parameters, which keep having no gradient: {}",
                nowhere.len(),
                parameters.len(),
                names(parameters, &nowhere)
            ));
        }
        if !elsewhere.is_empty() {
            warn(format_args!(
                "rank {rank} does not use {} of {} parameters that another rank uses; here their gradient counts \
                 as zero: {}",
                elsewhere.len(),
                parameters.len(),
                names(parameters, &elsewhere)
            ));
        }
        if !std::mem::replace(&mut self.began, true) && rank.is_main() && used.iter().all(|&used| used) {
            tracing::debug!(
                "find_unused_parameters is set, but some rank used every parameter in the first step; if that \
                 is always so, training is faster without it"
            );
        }
    }
}

fn names(parameters: &[ParameterSpec], which: &[usize]) -> String {
    let mut names: Vec<String> =
        which.iter().take(NAMES).map(|&index| parameters[index].to_string()).collect();
    if which.len() > NAMES {
        names.push(format!("and {} more", which.len() - NAMES));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn long_lists_are_counted_and_each_parameter_is_warned_of_once() {
        let parameters: Vec<_> =
            (0..20).map(|index| ParameterSpec::new(format!("p{index}"), [1], DType::F32)).collect();
        let all: Vec<usize> = (0..20).collect();
        let text = error(Rank::MAIN, &parameters, &all).to_string();
        assert!(text.contains("`p15`") && !text.contains("`p16`") && text.contains("and 4 more"), "{text}");
        assert!(text.contains("20 of 20"), "{text}");

        let mut warnings = Warnings::new(3);
        warnings.step(Rank::MAIN, &parameters[..3], &[0, 2], &[true, true, false]);
        assert_eq!(warnings.warned, [true, false, true]);
    }
}
