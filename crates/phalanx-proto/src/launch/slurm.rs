//! What Slurm's variables say of a job's nodes and tasks.

use crate::error::{Error, Result};
use crate::world_size::MAX_WORLD_SIZE;

/// The numbers from here on are Slurm's own for a batch script, an interactive shell and the like, which are no steps.
const FIRST_RESERVED_STEP: u32 = 0xffff_fff0;

/// The most brackets of a name in a list of nodes, each of which is expanded within the one before; Slurm writes a few.
const MAX_BRACKETS: usize = 16;
/// The most digits of a number in it, with leading zeros.
const MAX_DIGITS: usize = 64;

/// How to go without the allocation.
const WITHOUT: &str = "`phalanx run --standalone` starts workers on this machine alone";

/// The nodes that Slurm has allocated to a job, and how many tasks each is to have.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The job's number, `SLURM_JOB_ID`. The jobs of an array have different ones.
    pub job: String,
    /// Slurm's names for the nodes, which may differ from their host names.
    pub nodes: Vec<String>,
    /// How many tasks each is to have, or why that is not known.
    pub tasks: Result<Tasks>,
}

/// How many tasks the nodes of a job are to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tasks {
    /// For each node, at least one.
    pub counts: Vec<u32>,
    /// Where the numbers are from.
    pub source: &'static str,
}

impl Allocation {
    /// Reads the variables of a batch script, or of a shell that `salloc` has started; an empty one is not set. None where there is no
    /// allocation, and in a task of a step: `srun` has started that on each node already.
    ///
    /// # Errors
    /// If a variable cannot be understood, two contradict each other, or the job is heterogeneous.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let text =
            |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, text(name)?)));
        let job = first(["SLURM_JOB_ID", "SLURM_JOBID"]);
        let list = first(["SLURM_JOB_NODELIST", "SLURM_NODELIST"]);
        let (Some((_, job)), Some((list_name, list))) = (job, list) else { return Ok(None) };
        let names = node_names(&list).map_err(|cause| malformed(list_name, &list, &cause))?;
        if let Some((name, step)) = first(["SLURM_STEP_ID", "SLURM_STEPID"])
            && number(name, &step)? < FIRST_RESERVED_STEP
        {
            // A job that was submitted in a task of another one still has that one's variables.
            let of_step = text("SLURM_STEP_NODELIST").and_then(|list| node_names(&list).ok());
            if of_step.is_none_or(|of_step| of_step.iter().all(|name| names.contains(name))) {
                return Ok(None);
            }
        }
        if let Some((name, size)) = first(["SLURM_HET_SIZE", "SLURM_PACK_SIZE"])
            && size != "1"
        {
            return Err(Error::environment(format!(
                "{name}={size} says that the Slurm job {job} is heterogeneous, whose components have an allocation each"
            ))
            .with_remedy(format!(
                "start one launcher on each node: `srun --het-group=0,1 .. phalanx run --nnodes N --node-rank R --master-addr NODE ..`; {WITHOUT}"
            )));
        }
        let tasks = tasks(&text, names.len()).map(|(counts, source)| Tasks { counts, source });
        Ok(Some(Self { job, nodes: names, tasks }))
    }
}

/// Where the tasks of a step meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepMeeting {
    /// The step's name, which no other step has: that of a requeued job differs as well.
    pub id: String,
    /// The node of its first task, or the loopback where all tasks are on one node.
    pub address: String,
    /// A port below those that Linux gives out itself. Two steps on one node may have the same one by chance.
    pub port: u16,
}

impl StepMeeting {
    /// Reads the variables of a task that `srun` has started; none where they do not say all of it, in a heterogeneous job, in a terminal
    /// (`--pty`), and where the program orders its tasks by a file (`--distribution=arbitrary`).
    ///
    /// # Errors
    /// If the list of nodes cannot be understood.
    pub fn read(lookup: impl Fn(&str) -> Option<String>, is_on_one_node: bool) -> Result<Option<Self>> {
        const LIST: &str = "SLURM_STEP_NODELIST";
        let text =
            |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let parse = |name: &str| text(name).map(|value| number(name, &value)).transpose();
        // Of a terminal's tasks only the first one has a shell. With an order of one's own the first node need not have the first task.
        let has_own_order = text("SLURM_DISTRIBUTION").is_some_and(|order| order.starts_with("arbitrary"));
        if text("SLURM_HET_SIZE").is_some() || text("SLURM_PTY_PORT").is_some() || has_own_order {
            return Ok(None);
        }
        let (Some(job), Some(step), Some(list)) =
            (parse("SLURM_JOB_ID")?, parse("SLURM_STEP_ID")?, text(LIST))
        else {
            return Ok(None);
        };
        let restart = parse("SLURM_RESTART_COUNT")?.unwrap_or(0);
        let names = node_names(&list).map_err(|cause| malformed(LIST, &list, &cause))?;
        let first = names.into_iter().next().filter(|_| !is_on_one_node);
        // Steps of one job are apart, and so are jobs with numbers that follow each other.
        let port = 20_000 + (u64::from(job) + 1_009 * u64::from(step)) % 10_000;
        Ok(Some(Self {
            id: format!("slurm-{job}.{step}.{restart}"),
            address: first.unwrap_or_else(|| "127.0.0.1".to_owned()),
            port: port as u16,
        }))
    }
}

/// The number of tasks on each of `nodes`, and which variable it is from. As srun does: one on each unless numbers were asked for.
/// Without such a request, SLURM_TASKS_PER_NODE counts processors where nodes are exclusive.
fn tasks(text: &impl Fn(&str) -> Option<String>, nodes: usize) -> Result<(Vec<u32>, &'static str)> {
    const TASKS: &str = "SLURM_NTASKS";
    const PER_NODE: &str = "SLURM_NTASKS_PER_NODE";
    const LIST: &str = "SLURM_TASKS_PER_NODE";
    let parse = |name: &'static str| text(name).map(|value| number(name, &value)).transpose();
    let (wanted, per_node) = (parse(TASKS)?, parse(PER_NODE)?);
    if wanted.is_none() && per_node.is_none() {
        return Ok((vec![1; nodes], "submitted without --ntasks"));
    }
    let (most, source) = match (text(LIST), per_node) {
        (Some(list), _) => {
            let counts = counts(&list).map_err(|cause| malformed(LIST, &list, &cause))?;
            if counts.len() != nodes {
                let cause = format!("it has {} entries, and the job {nodes} nodes", counts.len());
                return Err(malformed(LIST, &list, &cause));
            }
            (counts, LIST)
        }
        (None, Some(count)) => (vec![count; nodes], PER_NODE),
        (None, None) => return Err(missing(LIST)),
    };
    if most.contains(&0) {
        return Err(malformed(source, &text(source).unwrap_or_default(), "a node has no task"));
    }
    let sum: u64 = most.iter().map(|count| u64::from(*count)).sum();
    match wanted.map(u64::from) {
        // Slurm's list then has what each node may have at most.
        Some(wanted) if wanted < sum && wanted >= nodes as u64 => Ok((fill(wanted, &most), source)),
        Some(wanted) if wanted != sum => Err(Error::environment(format!(
            "{TASKS}={wanted} contradicts {source}={}, which is {sum} tasks on {nodes} nodes",
            text(source).unwrap_or_default()
        ))
        .with_remedy("say with --nproc-per-node how many workers each node is to have")),
        _ => Ok((most, source)),
    }
}

/// `tasks` on nodes that take `most` each: one on each, then as many as fit, in order.
fn fill(tasks: u64, most: &[u32]) -> Vec<u32> {
    let mut left = tasks.saturating_sub(most.len() as u64);
    let take = |most: &u32| {
        let more = left.min(u64::from(most.saturating_sub(1)));
        left -= more;
        more as u32 + 1
    };
    most.iter().map(take).collect()
}

/// The names that a list such as `node[01-03,7],gpu-a` means, in order, as `scontrol show hostnames` prints them.
pub fn node_names(list: &str) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let entry = rest.get(..end_of_entry(rest)?).unwrap_or(rest);
        if entry.matches('[').count() > MAX_BRACKETS {
            return Err(format!("an entry has more than {MAX_BRACKETS} brackets"));
        }
        rest = rest.get(entry.len() + 1..).unwrap_or_default();
        expand(entry, String::new(), &mut names)?;
    }
    if names.is_empty() {
        return Err("there is no node in it".to_owned());
    }
    Ok(names)
}

/// Where the comma is that ends the first entry: not between brackets.
fn end_of_entry(list: &str) -> Result<usize, String> {
    let mut inside = false;
    for (index, c) in list.char_indices() {
        match c {
            '[' if inside => return Err("a bracket is within another".to_owned()),
            '[' => inside = true,
            ']' if !inside => return Err("a bracket is closed and not opened".to_owned()),
            ']' => inside = false,
            ',' if !inside => return Ok(index),
            c if c.is_alphanumeric() || "-._,".contains(c) => {}
            c => return Err(format!("{c:?} is in no node's name")),
        }
    }
    if inside { Err("a bracket is not closed".to_owned()) } else { Ok(list.len()) }
}

/// Appends `before` with each name that `entry` means.
fn expand(entry: &str, before: String, names: &mut Vec<String>) -> Result<(), String> {
    let Some((start, rest)) = entry.split_once('[') else {
        let name = before + entry;
        if name.is_empty() || name.starts_with('-') {
            return Err("a node has no name, or one that begins with a dash".to_owned());
        }
        if names.len() >= MAX_WORLD_SIZE as usize {
            return Err(format!("it has more than {MAX_WORLD_SIZE} nodes"));
        }
        names.push(name);
        return Ok(());
    };
    let (ranges, behind) = rest.split_once(']').unwrap_or((rest, ""));
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let parse = |text: &str| {
            let digits = text.len() <= MAX_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u64>()
                .ok()
                .filter(|_| digits)
                .ok_or_else(|| format!("{range:?} is not a range of numbers"))
        };
        let (from, to) = (parse(first)?, parse(last)?);
        if to < from {
            return Err(format!("the range {range:?} ends before it begins"));
        }
        // Leading zeros are kept.
        let width = first.len();
        for number in from..=to {
            expand(behind, format!("{before}{start}{number:0width$}"), names)?;
        }
    }
    Ok(())
}

/// The numbers that a list such as `2(x3),1` means: 2, 2, 2, 1.
pub fn counts(list: &str) -> Result<Vec<u32>, String> {
    let mut counts = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let parsed = match entry.split_once("(x") {
            Some((count, times)) => {
                times.strip_suffix(')').and_then(|times| Some((count.parse().ok()?, times.parse().ok()?)))
            }
            None => entry.parse().ok().map(|count| (count, 1)),
        };
        let (count, times): (u32, usize) =
            parsed.ok_or_else(|| format!("{entry:?} is not COUNT or COUNT(xTIMES)"))?;
        if times > MAX_WORLD_SIZE as usize - counts.len() {
            return Err(format!("it has more than {MAX_WORLD_SIZE} nodes"));
        }
        counts.resize(counts.len() + times, count);
    }
    Ok(counts)
}

fn number(name: &str, value: &str) -> Result<u32> {
    value.parse().map_err(|_| malformed(name, value, "it is not a number"))
}

fn malformed(name: &str, value: &str, cause: &str) -> Error {
    Error::environment(format!("{name}={value}, which Slurm sets, cannot be used: {cause}"))
        .with_remedy(WITHOUT)
}

fn missing(name: &str) -> Error {
    Error::environment(format!(
        "Slurm has not set {name}, so the number of workers on each node is not known"
    ))
    .with_remedy(format!("give it with --nproc-per-node; {WITHOUT}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Variables and their values.
    type Pairs<'a> = &'a [(&'a str, &'a str)];

    fn read(variables: Pairs<'_>) -> Result<Option<Allocation>> {
        Allocation::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    /// The job 7 on these nodes, with `more`.
    fn job(list: &str, more: Pairs<'_>) -> Result<Option<Allocation>> {
        read(&[&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", list)], more].concat())
    }

    fn tasks_of(list: &str, more: Pairs<'_>) -> Vec<u32> {
        job(list, more).unwrap().unwrap().tasks.unwrap().counts
    }

    /// What `scontrol show hostnames` of Slurm 22.05 prints.
    #[test]
    fn lists_of_nodes_are_slurms() {
        let cases = [
            ("node[01-03,7],gpu-a", "node01 node02 node03 node7 gpu-a"),
            (
                "unit[0-1]rack[00-02]",
                "unit0rack00 unit0rack01 unit0rack02 unit1rack00 unit1rack01 unit1rack02",
            ),
            ("n9,n[10-11]", "n9 n10 n11"),
            ("n[8-11]", "n8 n9 n10 n11"),
            ("n[098-101]", "n098 n099 n100 n101"),
            ("a.example", "a.example"),
        ];
        for (list, names) in cases {
            assert_eq!(node_names(list).unwrap().join(" "), names, "{list}");
        }
        for bad in [
            "",
            ",",
            "n[1-",
            "n[2-1]",
            "n[a-b]",
            "n[]",
            "n]1[",
            "n[1[2]]",
            "a b",
            "-w",
            "n[0-99999999]",
            "n[+1]",
            "$x",
        ] {
            assert!(node_names(bad).is_err(), "{bad}");
        }
        // Longer than any number that can be written, and deeper than calls may be.
        let padded = format!("n[{}1]", "0".repeat(70_000));
        assert!(node_names(&padded).unwrap_err().contains("is not a range of numbers"));
        assert!(node_names(&"[1]".repeat(40_000)).unwrap_err().contains("more than 16 brackets"));
    }

    #[test]
    fn lists_of_tasks_are_slurms() {
        assert_eq!(counts("2(x3),1"), Ok(vec![2, 2, 2, 1]));
        assert_eq!(counts("4"), Ok(vec![4]));
        for bad in ["", "x", "2(x", "2(xy)", "(x9)", "1(x4294967295)"] {
            assert!(counts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nodes_have_the_tasks_that_were_asked_for() {
        let cases: [(Pairs<'_>, &[u32]); 6] = [
            // As `sbatch` of Slurm 22.05 sets them: -N3; -N3 --exclusive; -N3 --ntasks-per-node=2; -N3 -n5; -N3 -n5 --ntasks-per-node=4.
            (&[("SLURM_TASKS_PER_NODE", "1(x3)")], &[1, 1, 1]),
            (&[("SLURM_TASKS_PER_NODE", "16(x3)")], &[1, 1, 1]),
            (
                &[("SLURM_TASKS_PER_NODE", "2(x3)"), ("SLURM_NTASKS", "6"), ("SLURM_NTASKS_PER_NODE", "2")],
                &[2, 2, 2],
            ),
            (&[("SLURM_TASKS_PER_NODE", "2(x2),1"), ("SLURM_NTASKS", "5")], &[2, 2, 1]),
            (
                &[("SLURM_TASKS_PER_NODE", "4(x3)"), ("SLURM_NTASKS", "5"), ("SLURM_NTASKS_PER_NODE", "4")],
                &[3, 1, 1],
            ),
            (&[("SLURM_NTASKS_PER_NODE", "2")], &[2, 2, 2]),
        ];
        for (variables, tasks) in cases {
            assert_eq!(tasks_of("n[1-3]", variables), tasks, "{variables:?}");
        }
    }

    #[test]
    fn a_step_and_no_job_have_no_allocation() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[("SLURM_JOB_ID", "7")]).unwrap().is_none());
        assert!(job("", &[]).unwrap().is_none());
        assert!(job("n1", &[("SLURM_STEP_ID", "0")]).unwrap().is_none());
        let of_step = |nodes| [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NODELIST", nodes)];
        assert!(job("n[1-4]", &of_step("n2")).unwrap().is_none());
        // Submitted in a task of another job.
        assert_eq!(job("n[1-4]", &of_step("n7")).unwrap().unwrap().nodes.len(), 4);
        // salloc's interactive shell is a step of its own kind.
        let shell =
            job("n[1-2]", &[("SLURM_STEP_ID", "4294967290"), ("SLURM_PROCID", "0")]).unwrap().unwrap();
        assert_eq!((shell.job.as_str(), shell.nodes.len()), ("7", 2));
    }

    #[test]
    fn tasks_of_a_step_meet_at_its_first_node() {
        let meeting = |more: &[(&str, &str)], is_on_one_node| {
            let step =
                [("SLURM_JOB_ID", "70123"), ("SLURM_STEP_ID", "2"), ("SLURM_STEP_NODELIST", "n[07-08]")];
            let all: Vec<_> = step.iter().chain(more).copied().collect();
            let lookup = |name: &str| {
                all.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            StepMeeting::read(lookup, is_on_one_node).unwrap()
        };
        let (id, address, port) = ("slurm-70123.2.0".to_owned(), "n07".to_owned(), 22_141);
        assert_eq!(meeting(&[], false), Some(StepMeeting { id, address, port }));
        assert_eq!(meeting(&[], true).unwrap().address, "127.0.0.1");
        assert_eq!(meeting(&[("SLURM_RESTART_COUNT", "3")], false).unwrap().id, "slurm-70123.2.3");
        for of_its_own in
            [("SLURM_HET_SIZE", "2"), ("SLURM_PTY_PORT", "7"), ("SLURM_DISTRIBUTION", "arbitrary")]
        {
            assert_eq!(meeting(&[of_its_own], false), None);
        }
        assert_eq!(meeting(&[("SLURM_STEP_NODELIST", "")], false), None);
        let bad = |name: &str| Some(if name == "SLURM_STEP_NODELIST" { "n[1" } else { "1" }.to_owned());
        let others = ["SLURM_HET_SIZE", "SLURM_PTY_PORT", "SLURM_DISTRIBUTION"];
        let unset = |name: &str| bad(name).filter(|_| !others.contains(&name));
        assert!(StepMeeting::read(unset, false).unwrap_err().to_string().contains("SLURM_STEP_NODELIST=n[1"));
    }

    #[test]
    fn what_cannot_be_used_is_named_with_what_to_do() {
        let cases: [(&str, Pairs<'_>, &[&str]); 7] = [
            ("n[1-2", &[], &["SLURM_JOB_NODELIST=n[1-2", "not closed", "--standalone"]),
            ("n[1-2]", &[("SLURM_HET_SIZE", "2")], &["SLURM_HET_SIZE=2", "heterogeneous", "--het-group"]),
            (
                "n[1-2]",
                &[("SLURM_NTASKS", "2"), ("SLURM_TASKS_PER_NODE", "1")],
                &["SLURM_TASKS_PER_NODE=1", "1 entries"],
            ),
            (
                "n[1-2]",
                &[("SLURM_NTASKS", "9"), ("SLURM_TASKS_PER_NODE", "2(x2)")],
                &["SLURM_NTASKS=9", "4 tasks", "--nproc-per-node"],
            ),
            (
                "n[1-2]",
                &[("SLURM_NTASKS", "1"), ("SLURM_TASKS_PER_NODE", "2(x2)")],
                &["SLURM_NTASKS=1", "--nproc-per-node"],
            ),
            ("n[1-2]", &[("SLURM_NTASKS", "many")], &["SLURM_NTASKS=many", "not a number"]),
            ("n[1-2]", &[("SLURM_NTASKS", "2")], &["SLURM_TASKS_PER_NODE", "--nproc-per-node"]),
        ];
        for (list, more, said) in cases {
            // The numbers of tasks are asked for only where no option gives them.
            let error = job(list, more).and_then(|job| job.unwrap().tasks).unwrap_err();
            assert!(
                error.is_environment() && said.iter().all(|part| error.to_string().contains(part)),
                "{error}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_list_makes_the_reader_panic_or_gives_an_option(list in "[n0-9x(),\\[\\]-]{0,24}") {
            if let Ok(names) = node_names(&list) {
                prop_assert!(names.iter().all(|name| !name.is_empty() && !name.starts_with('-') && !name.contains(',')));
            }
            let _ = counts(&list);
        }

        #[test]
        fn a_compressed_list_is_its_names(first in 0_u64..2000, more in 0_u64..50, width in 1_usize..6) {
            let names: Vec<String> = (first..=first + more).map(|number| format!("n{number:0width$}")).collect();
            prop_assert_eq!(node_names(&format!("n[{first:0width$}-{}]", first + more)).unwrap(), names);
        }

        #[test]
        fn all_tasks_are_placed_and_no_node_is_empty(most in prop::collection::vec(1_u32..9, 1..9), share in 0_u64..100) {
            let (nodes, sum) = (most.len() as u64, most.iter().map(|count| u64::from(*count)).sum::<u64>());
            let tasks = nodes + (sum - nodes) * share / 100;
            let filled = fill(tasks, &most);
            prop_assert_eq!(filled.iter().map(|count| u64::from(*count)).sum::<u64>(), tasks);
            prop_assert!(filled.iter().zip(&most).all(|(count, most)| (1..=*most).contains(count)));
        }
    }
}
