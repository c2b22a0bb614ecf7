//! The findings, and how they are printed: pure.

use phalanx::Error;
use serde::{Deserialize, Serialize};

/// What a finding means for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Good,
    /// Information; nothing fails because of it.
    Note,
    Bad,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Finding {
    pub check: String,
    pub verdict: Verdict,
    pub text: String,
    pub remedy: Option<String>,
}

/// All findings on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(super) host: String,
    /// What identifies the host, as its name does not.
    pub(super) host_id: String,
    pub(super) findings: Vec<Finding>,
}

impl Report {
    pub(super) fn new(host: String) -> Self {
        Self { host, host_id: phalanx::host_id(), findings: Vec::new() }
    }

    pub(super) fn good(&mut self, check: &str, text: impl Into<String>) {
        self.add(check, Verdict::Good, text.into(), None);
    }

    pub(super) fn note(&mut self, check: &str, text: impl Into<String>) {
        self.add(check, Verdict::Note, text.into(), None);
    }

    /// Information, with what could be done about it.
    pub(super) fn advise(&mut self, check: &str, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Verdict::Note, text.into(), Some(remedy.into()));
    }

    pub(super) fn bad(&mut self, check: &str, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Verdict::Bad, text.into(), Some(remedy.into()));
    }

    /// What an error says, with its own remedy; with this one if it has none.
    pub(super) fn failed(&mut self, check: &str, error: &Error, remedy: &str) {
        let remedy = error.remedy().unwrap_or(remedy);
        self.bad(check, error.clone().without_remedy().to_string(), remedy);
    }

    fn add(&mut self, check: &str, verdict: Verdict, text: String, remedy: Option<String>) {
        self.findings.push(Finding { check: check.to_owned(), verdict, text, remedy });
    }

    pub(super) fn is_good(&self) -> bool {
        self.findings.iter().all(|finding| finding.verdict != Verdict::Bad)
    }

    /// Adds what differs on another host, or is a defect there.
    pub(super) fn compare(&mut self, other: &Self) {
        /// Findings that should be the same on all hosts.
        const ALIKE: [&str; 6] = ["phalanx", "kernel", "cores", "descriptors", "cuda", "nccl"];
        for theirs in &other.findings {
            let check = format!("{}: {}", other.host, theirs.check);
            let ours = self.findings.iter().find(|ours| ours.check == theirs.check);
            if theirs.verdict == Verdict::Bad {
                self.findings.push(Finding { check, ..theirs.clone() });
            } else if let Some(ours) = ours.filter(|ours| ours.text != theirs.text)
                && ALIKE.contains(&theirs.check.as_str())
            {
                let text = format!("{}, and on {} {}", theirs.text, self.host, ours.text);
                self.add(&check, Verdict::Note, text, theirs.remedy.clone());
            }
        }
    }

    /// A line for each finding, and one below it for its remedy.
    pub(super) fn text(&self, colour: bool) -> String {
        let width = self.findings.iter().map(|finding| finding.check.chars().count()).max().unwrap_or(0);
        let mut text = String::new();
        for Finding { check, verdict, text: said, remedy } in &self.findings {
            let (mark, on) = match verdict {
                Verdict::Good => ("good", "\x1b[32m"),
                Verdict::Note => ("note", "\x1b[33m"),
                Verdict::Bad => ("bad ", "\x1b[1;31m"),
            };
            let (on, off) = if colour { (on, "\x1b[0m") } else { ("", "") };
            text += &format!("{on}{mark}{off}  {check:width$}  {said}\n");
            if let Some(remedy) = remedy {
                text += &format!("{:4}  {:width$}  -> {remedy}\n", "", "");
            }
        }
        text
    }

    /// One JSON object: whether all is good, the host, the findings.
    pub(super) fn json(&self) -> String {
        let object =
            serde_json::json!({ "good": self.is_good(), "host": self.host, "findings": self.findings });
        format!("{object}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut report = Report::new("node0".to_owned());
        report.good("kernel", "Linux 6.1");
        report.bad("descriptors", "8", "raise `ulimit -n`");
        report
    }

    #[test]
    fn lines_are_aligned_and_colour_is_only_where_it_is_wanted() {
        let plain =
            "good  kernel       Linux 6.1\nbad   descriptors  8\n                   -> raise `ulimit -n`\n";
        assert_eq!(sample().text(false), plain);
        let coloured = sample().text(true);
        assert!(coloured.contains("\x1b[32mgood\x1b[0m  kernel") && coloured.contains("\x1b[1;31mbad"));
        assert!(!sample().is_good());
    }

    #[test]
    fn an_error_keeps_its_own_remedy() {
        let mut report = Report::new("node0".to_owned());
        let error = Error::environment("the store wants a key");
        report.failed("store", &error, "is it there?");
        report.failed("store", &error.with_remedy("give the job's key"), "is it there?");
        let told: Vec<_> = report.findings.iter().map(|told| (&*told.text, told.remedy.as_deref())).collect();
        let text = "the store wants a key";
        assert_eq!(told, [(text, Some("is it there?")), (text, Some("give the job's key"))]);
    }

    #[test]
    fn json_says_the_same() {
        let object: serde_json::Value = serde_json::from_str(&sample().json()).unwrap();
        assert_eq!((&object["good"], &object["host"]), (&false.into(), &"node0".into()));
        assert_eq!(object["findings"][1]["verdict"], "bad");
        assert_eq!(object["findings"][1]["remedy"], "raise `ulimit -n`");
    }

    #[test]
    fn other_hosts_are_mentioned_where_they_differ_or_are_bad() {
        let (mut own, mut other) = (Report::new("node0".to_owned()), Report::new("node1".to_owned()));
        for (report, kernel) in [(&mut own, "6.1"), (&mut other, "6.5")] {
            report.good("kernel", kernel);
            report.good("cores", "8");
            report.note("memory", kernel);
        }
        other.bad("store", "refused", "is it there?");
        own.compare(&other);
        let added: Vec<_> =
            own.findings[3..].iter().map(|finding| (&*finding.check, &*finding.text)).collect();
        assert_eq!(added, [("node1: kernel", "6.5, and on node0 6.1"), ("node1: store", "refused")]);
        assert!(!own.is_good());
    }
}
