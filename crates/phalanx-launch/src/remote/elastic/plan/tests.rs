//! An elastic job whose hosts never answer by themselves.

use std::ffi::OsString;

use super::*;
use crate::rank::Rank;
use crate::remote::driver::{Driver, tests::silent_job};
use crate::remote::{HostDiscovery, RemoteShell};

#[test]
fn a_signal_does_not_hide_that_all_workers_had_ended_well() {
    let outcome_of = |second: Option<Outcome>| {
        let (_folder, job) = silent_job("node1,node2");
        let job = job.bind(IpAddr::from([127, 0, 0, 1]));
        let elastic = ElasticHosts::new(WorldSize::new(2).unwrap());
        let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
        let driver = Driver::start(&job, &mut observer, |launchers| {
            let mut plan = elastic.plan(launchers)?;
            plan.act(launchers)?;
            for index in 0..launchers.peers.len() {
                launchers.peers[index].was_told_to_start = true;
                let (rank, pid, exit) = (Rank::new(launchers.peers[index].first), 7, Exit::Code(0));
                plan.handle_event(launchers, index, &RemoteEvent::Started { rank, local_rank: 0, pid });
                plan.handle_event(launchers, index, &RemoteEvent::Exited { rank, pid, exit });
            }
            assert!(launchers.peers.iter().all(|peer| peer.knows_of_ending));
            launchers.end = Some(DriverEnd::Interrupted(Signal::INT));
            for outcome in [Some(Outcome::Succeeded), second] {
                let mut peer = launchers.peers.remove(0);
                let (exits, world_size, nodes, restarts, replacements) = (Vec::new(), None, 2, 0, 0);
                peer.end = outcome.map(|outcome| {
                    LauncherEnd::Reported(RemoteReport {
                        outcome,
                        exits,
                        world_size,
                        nodes,
                        restarts,
                        replacements,
                    })
                });
                plan.handle_loss(launchers, peer);
            }
            Ok(Box::new(plan) as _)
        });
        driver.unwrap().run().unwrap().outcome
    };
    let interrupted = Outcome::Interrupted(Signal::INT);
    assert_eq!(outcome_of(Some(Outcome::Succeeded)), Outcome::Succeeded);
    assert_eq!(outcome_of(Some(interrupted.clone())), interrupted);
    assert_eq!(outcome_of(None), interrupted);
}

/// The others would take a worker that is stopped, as in a debugger, for frozen at the end of the job, and kill it.
#[test]
fn a_worker_of_a_host_that_has_left_the_list_ends_well_and_the_job_does_not_end() {
    let (_folder, job) = silent_job("node1,node2");
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::ONE);
    let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        let ranks: Vec<Rank> = launchers.peers.iter().map(|peer| Rank::new(peer.first)).collect();
        for (index, &rank) in ranks.iter().enumerate() {
            launchers.peers[index].was_told_to_start = true;
            let started = RemoteEvent::Started { rank, local_rank: 0, pid: 7 };
            plan.handle_event(launchers, index, &started);
        }
        plan.list(&"node2".parse()?);
        plan.act(launchers)?;
        let leaves: Vec<bool> = launchers.peers.iter().map(|peer| peer.leaves).collect();
        assert_eq!(leaves, [true, false]);
        for (index, knows) in [(0, false), (1, true)] {
            let exited = RemoteEvent::Exited { rank: ranks[index], pid: 7, exit: Exit::Code(0) };
            plan.handle_event(launchers, index, &exited);
            assert_eq!(launchers.peers[1].knows_of_ending, knows);
        }
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
}

#[test]
fn of_each_worker_of_a_host_that_is_lost_it_is_said_that_it_is_gone() {
    let (_folder, job) = silent_job("node1:2,node2");
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::new(1).unwrap());
    let mut told = Vec::new();
    let mut observer = |event: Event<'_>| {
        if let Event::Exited { rank, pid, exit } = event {
            told.push((rank.get(), pid, exit));
        }
        std::ops::ControlFlow::Continue(())
    };
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        for local_rank in [0, 1] {
            let (rank, pid) = (Rank::new(local_rank), 70 + local_rank);
            plan.handle_event(launchers, 0, &RemoteEvent::Started { rank, local_rank, pid });
        }
        let (rank, pid) = (Rank::new(0), 70);
        plan.handle_event(launchers, 0, &RemoteEvent::Exited { rank, pid, exit: Exit::Code(0) });
        let lost = launchers.peers.remove(0);
        plan.handle_loss(launchers, lost);
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
    assert_eq!(told, [(0, 70, Exit::Code(0)), (1, 71, Exit::Lost)]);
}

/// As where this machine has no room for one more process.
#[test]
fn a_host_that_cannot_be_started_while_others_train_is_left_out_for_a_while() {
    let (folder, job) = silent_job("node1,node2");
    let connect = folder.path().join("connect");
    std::os::unix::fs::symlink("/bin/sh", &connect).unwrap();
    let shell = format!("{} {}", connect.display(), folder.path().join("shell").display());
    let job = job.shell(RemoteShell::default().program(&OsString::from(shell)));
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::ONE);
    let mut told = Vec::new();
    let mut observer = |event: Event<'_>| {
        if let Event::Warning { text } = event {
            told.push(text.to_owned());
        }
        std::ops::ControlFlow::Continue(())
    };
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.list(&"node1".parse()?);
        plan.act(launchers)?;
        launchers.peers[0].was_told_to_start = true;
        let (rank, local_rank, pid) = (Rank::new(0), 0, 7);
        plan.handle_event(launchers, 0, &RemoteEvent::Started { rank, local_rank, pid });
        std::fs::remove_file(&connect).unwrap();
        plan.list(&"node1,node2".parse()?);
        plan.act(launchers)?;
        assert!(launchers.peers.len() == 1 && launchers.end.is_none() && plan.workers == 1);
        assert_eq!(
            (launchers.started_peers, launchers.connections),
            (2, 2),
            "another one would get its number"
        );
        assert!(plan.host_manager.wake_at().is_some(), "it is not tried again");
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
    let is_told = |text: &String| text.starts_with("node2: cannot start ") && text.ends_with("out for 5 s");
    assert!(told.len() == 1 && told.iter().all(is_told), "{told:?}");
}

#[test]
fn that_the_workers_are_ended_is_said_once_for_all_hosts() {
    let (_folder, job) = silent_job("node1,node2");
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::new(1).unwrap());
    let mut told = Vec::new();
    let mut observer = |event: Event<'_>| {
        if let Event::Ending { signal } = event {
            told.push(Some(signal));
        } else if matches!(event, Event::Killing) {
            told.push(None);
        }
        std::ops::ControlFlow::Continue(())
    };
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        launchers.end = Some(DriverEnd::Planned);
        // Without a grace period, a host kills its workers before it is heard of another.
        for index in 0..launchers.peers.len() {
            for event in [RemoteEvent::Ending { signal: Signal::TERM }, RemoteEvent::Killing] {
                plan.handle_event(launchers, index, &event);
            }
        }
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
    assert_eq!(told, [Some(Signal::TERM), None]);
}

#[test]
fn the_store_is_served_only_when_a_host_has_answered_where_it_finds_this_one() {
    let (_folder, job) = silent_job("node1,node2");
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::new(1).unwrap());
    let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        assert_eq!((launchers.peers.len(), plan.store.is_some()), (2, false));
        // It does not say from where it was reached; the other one may.
        launchers.peers[0].hello = Some(None);
        plan.act(launchers)?;
        assert!(plan.store.is_none());
        launchers.peers[1].end = Some(LauncherEnd::Failed(Error::timeout("it has not answered")));
        launchers.peers[1].leaves = true;
        plan.act(launchers)?;
        assert!(plan.store.is_some(), "nobody is waited for any more");
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
}

#[test]
fn before_a_script_has_printed_a_host_no_address_is_guessed() {
    let (_folder, mut job) = silent_job("node1");
    job.hosts = HostList::default();
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::ONE).discovery(HostDiscovery::new("exec sleep 600"));
    let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        assert!(plan.store.is_none());
        Ok(Box::new(plan) as _)
    });
    drop(driver.unwrap());
}

#[test]
fn where_no_host_comes_in_time_it_is_said_what_is_wrong_with_the_script() {
    for (script, trouble) in [("true", "prints no host"), ("exit 3", "it ended with exit status: 3")] {
        let (_folder, mut job) = silent_job("node1");
        job.hosts = HostList::default();
        let elastic = ElasticHosts::new(WorldSize::ONE).discovery(HostDiscovery::new(script));
        let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
        let driver = Driver::start(&job, &mut observer, |launchers| {
            let mut plan = elastic.plan(launchers)?;
            let deadline = Deadline::after(Duration::from_secs(60));
            while plan.script_trouble.is_none() {
                assert!(!deadline.has_passed(), "the script has not answered");
                plan.act(launchers)?;
                std::thread::sleep(Duration::from_millis(1));
            }
            launchers.end = Some(DriverEnd::Planned);
            Ok(Box::new(plan) as _)
        });
        let error = driver.unwrap().run().unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains(trouble), "{error}");
    }
}

#[test]
fn a_host_that_was_started_again_is_one_node() {
    let (_folder, job) = silent_job("node1,node2");
    let job = job.bind(IpAddr::from([127, 0, 0, 1]));
    let elastic = ElasticHosts::new(WorldSize::ONE);
    let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
    let driver = Driver::start(&job, &mut observer, |launchers| {
        let mut plan = elastic.plan(launchers)?;
        plan.act(launchers)?;
        launchers.launch(0, Host::named("node1", 1), 0)?;
        launchers.peers.clear();
        launchers.end = Some(DriverEnd::Interrupted(Signal::INT));
        Ok(Box::new(plan) as _)
    });
    assert_eq!(driver.unwrap().run().unwrap().nodes, 2);
}

#[test]
fn a_job_does_not_end_for_what_it_has_recovered_from_weeks_before() {
    fn lose_first(plan: &mut ElasticPlan, launchers: &mut Launchers<'_>, why: &str) {
        let mut peer = launchers.peers.remove(0);
        peer.end = Some(LauncherEnd::Failed(Error::environment(why)));
        plan.handle_loss(launchers, peer);
    }
    let end_of = |lasts: Duration| {
        let (_folder, job) = silent_job("node1,node2");
        let job = job.bind(IpAddr::from([127, 0, 0, 1]));
        let elastic = ElasticHosts::new(WorldSize::ONE);
        let mut observer = |_: Event<'_>| std::ops::ControlFlow::Continue(());
        let driver = Driver::start(&job, &mut observer, |launchers| {
            let mut plan = elastic.plan(launchers)?;
            plan.act(launchers)?;
            for index in 0..launchers.peers.len() {
                launchers.peers[index].was_told_to_start = true;
                let rank = Rank::new(launchers.peers[index].first);
                plan.handle_event(launchers, index, &RemoteEvent::Started { rank, local_rank: 0, pid: 7 });
            }
            lose_first(&mut plan, launchers, "the first host is gone");
            plan.act(launchers)?;
            plan.enough_since = plan.enough_since.and_then(|since| since.checked_sub(lasts));
            lose_first(&mut plan, launchers, "the last host is gone");
            Ok(Box::new(plan) as _)
        });
        driver.unwrap().run().unwrap_err().to_string()
    };
    let soon = end_of(Duration::ZERO);
    assert!(soon.contains("the first host is gone"), "{soon}");
    let late = end_of(RECOVERY_INTERVAL);
    assert!(late.contains("the last host is gone"), "{late}");
}
