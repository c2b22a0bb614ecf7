//! What is said about unused parameters, which get no gradient in a step.

use super::ParameterSpec;
use crate::error::Error;
use crate::rank::Rank;

/// Names that a message lists before it only counts.
const NAMES: usize = 16;

/// The error of a step in which the parameters `unused` got no gradient.
pub fn error(rank: Rank, parameters: &[ParameterSpec], unused: &[usize]) -> Error {
    Error::invalid_argument(format!(
        "rank {rank}: backward gave no gradient to {} of {} parameters: {}",
        unused.len(),
        parameters.len(),
        names(parameters, unused)
    ))
    .with_remedy("let every parameter take part in the loss on every rank, or set find_unused_parameters")
}

/// Warnings of unused parameters: of each once, however often it is unused.
pub struct Warnings {
    warned: Vec<bool>,
    /// Whether any step has been looked at.
    began: bool,
}

/// What there is to say after a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Remarks {
    /// For the user.
    pub warnings: Vec<String>,
    /// Whether every rank used every parameter in the first step, so that `find_unused_parameters` may cost time for nothing.
    pub found_none: bool,
}

impl Warnings {
    /// For a model with so many parameters.
    pub fn new(parameters: usize) -> Self {
        Self { warned: vec![false; parameters], began: false }
    }

    /// A step is over: `unused` got no gradient on this `rank`, and `used` says which got one on any.
    pub fn step(
        &mut self,
        rank: Rank,
        parameters: &[ParameterSpec],
        unused: &[usize],
        used: &[bool],
    ) -> Remarks {
        let (elsewhere, nowhere): (Vec<usize>, Vec<usize>) = unused
            .iter()
            .filter(|&&index| !std::mem::replace(&mut self.warned[index], true))
            .partition(|&&index| used[index]);
        let mut warnings = Vec::new();
        // Every rank knows what no rank uses; one of them says it.
        if !nowhere.is_empty() && rank.is_main() {
            warnings.push(format!(
                "no rank uses {} of {} parameters, which keep having no gradient: {}",
                nowhere.len(),
                parameters.len(),
                names(parameters, &nowhere)
            ));
        }
        if !elsewhere.is_empty() {
            warnings.push(format!(
                "rank {rank} does not use {} of {} parameters that another rank uses; here their gradient counts \
                 as zero: {}",
                elsewhere.len(),
                parameters.len(),
                names(parameters, &elsewhere)
            ));
        }
        let is_first = !std::mem::replace(&mut self.began, true);
        Remarks { warnings, found_none: is_first && rank.is_main() && used.iter().all(|&used| used) }
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
        let remarks = warnings.step(Rank::MAIN, &parameters[..3], &[0, 2], &[true, true, false]);
        let [nowhere, elsewhere] = &remarks.warnings[..] else { panic!("{remarks:?}") };
        assert!(nowhere.contains("no rank uses 1 of 3") && nowhere.contains("`p2`"), "{nowhere}");
        assert!(
            elsewhere.contains("rank 0 does not use 1 of 3") && elsewhere.contains("`p0`"),
            "{elsewhere}"
        );
        assert_eq!(
            warnings.step(Rank::MAIN, &parameters[..3], &[0, 2], &[true, true, false]),
            Remarks::default()
        );
    }
}
