use std::collections::HashMap;

use super::worker::HOROVODRUN;
use super::*;

fn parse(pairs: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
    let map: HashMap<String, String> =
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    LaunchEnv::from_lookup(|name| map.get(name).cloned())
}

const FULL: [(&str, &str); 4] =
    [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

fn with(extra: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    FULL.iter()
        .copied()
        .filter(|(k, _)| extra.iter().all(|(e, _)| e != k))
        .chain(extra.iter().copied())
        .collect()
}

#[test]
fn no_variables_is_a_world_of_one() {
    assert_eq!(parse(&[]).unwrap(), None);
}

#[test]
fn the_four_variables_are_enough() {
    let env = parse(&FULL).unwrap().unwrap();
    assert_eq!((env.rank.get(), env.world_size.get()), (1, 2));
    assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address: "localhost".into(), port: 29500 });
    assert_eq!((env.local_rank, env.restart_count, env.agent_store), (None, Generation(0), false));
}

#[test]
fn what_is_unset_or_empty_is_named() {
    for lone in FULL {
        let error = parse(&[lone]).unwrap_err();
        assert!(error.is_environment());
        for (name, _) in FULL.iter().filter(|(name, _)| *name != lone.0) {
            assert!(error.to_string().contains(&format!("{name} is not set")), "{error}");
        }
        let error = parse(&with(&[(lone.0, " ")])).unwrap_err();
        assert!(error.to_string().contains(&format!("{} is empty", lone.0)), "{error}");
        assert!(error.remedy().is_some());
    }
}

#[test]
fn what_is_malformed_is_named() {
    let cases = [
        ("RANK", "two"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "70000"),
        ("MASTER_PORT", "70000"),
        ("MASTER_ADDR", "tcp://node0"),
        ("MASTER_ADDR", "node0:29500"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("GROUP_RANK", "x"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
        ("TORCHELASTIC_USE_AGENT_STORE", "maybe"),
        ("PHALANX_BIND", "eth0"),
        ("PHALANX_RENDEZVOUS", "etcd://x"),
    ];
    for (name, value) in cases {
        let error = parse(&with(&[(name, value)])).unwrap_err();
        assert!(
            error.is_environment() && error.to_string().contains(&format!("{name}={value:?}")),
            "{error}"
        );
    }
}

#[test]
fn other_launchers_are_understood() {
    const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    let slurm = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "5"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ];
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "5"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "5"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
    let horovod = [
        ("HOROVOD_RANK", "3"),
        ("HOROVOD_SIZE", "5"),
        ("HOROVOD_LOCAL_RANK", "1"),
        ("HOROVOD_LOCAL_SIZE", "2"),
        ("HOROVOD_CROSS_RANK", "1"),
    ];
    let mvapich = [
        ("MV2_COMM_WORLD_RANK", "3"),
        ("MV2_COMM_WORLD_SIZE", "5"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
        ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let jsrun = [
        ("JSM_NAMESPACE_RANK", "3"),
        ("JSM_NAMESPACE_SIZE", "5"),
        ("JSM_NAMESPACE_LOCAL_RANK", "1"),
        ("JSM_NAMESPACE_LOCAL_SIZE", "2"),
        ("PMIX_RANK", "3"),
    ];
    let pals = [
        ("PALS_RANKID", "3"),
        ("PALS_NODEID", "1"),
        ("PALS_LOCAL_RANKID", "1"),
        ("PALS_LOCAL_SIZE", "2"),
        ("PMI_RANK", "3"),
        ("PMI_SIZE", "5"),
    ];
    let cray = [("PMI_RANK", "3"), ("PMI_SIZE", "5"), ("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "2")];
    for (launcher, node) in [
        (&slurm[..], Some(1)),
        (&open_mpi, None),
        (&hydra, None),
        (&horovod, Some(1)),
        (&mvapich, None),
        (&jsrun, None),
        (&pals, Some(1)),
        (&cray, None),
    ] {
        let env = parse(&[launcher, &MASTER[..]].concat()).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get(), env.group_rank), (3, 5, node));
        assert_eq!((env.local_rank, env.local_world_size), (Some(1), Some(2)), "{launcher:?}");
        // Without a rendezvous, the error says what to set.
        let error = parse(launcher).unwrap_err();
        assert!(error.to_string().contains("MASTER_ADDR is not set"), "{error}");
        assert!(error.remedy().unwrap().contains("PHALANX_RENDEZVOUS"));
        let shared = ("PHALANX_RENDEZVOUS", "file:///shared/job7");
        let env = parse(&[launcher, &[shared]].concat()).unwrap().unwrap();
        assert_eq!(env.rendezvous, RendezvousEndpoint::Url(shared.1.into()));
        // torchrun's variables, if they are there, have priority.
        let env = parse(&[launcher, &FULL[..]].concat()).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get()), (1, 2));
    }
}

#[test]
fn what_a_launcher_has_started_is_told_from_ranks_that_are_set_by_hand() {
    let is_launched = |pairs: &[(&str, &str)]| {
        let lookup =
            |name: &str| pairs.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
        is_launched_in(&Variables { lookup })
    };
    assert!(!is_launched(&[]) && !is_launched(&FULL));
    assert!(is_launched(&with(&[("TORCHELASTIC_RUN_ID", "none")])));
    let slurm = |tasks| [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", tasks)];
    assert!(is_launched(&slurm("2")));
    // The only task of a step may start ranks itself, in a shell.
    assert!(!is_launched(&slurm("1")));
}

#[test]
fn flux_says_no_number_of_ranks_on_a_host() {
    let flux = [("FLUX_TASK_RANK", "3"), ("FLUX_JOB_SIZE", "5"), ("FLUX_TASK_LOCAL_ID", "1")];
    let master = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    let env = parse(&[&flux[..], &master].concat()).unwrap().unwrap();
    assert_eq!((env.rank.get(), env.world_size.get()), (3, 5));
    assert_eq!((env.local_rank, env.local_world_size), (Some(1), None));
}

#[test]
fn a_rank_without_a_size_is_no_world_of_one() {
    let lone =
        ["PMIX_RANK", "ALPS_APP_PE", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK"];
    for (name, rank) in lone.into_iter().flat_map(|name| [(name, "0"), (name, "3")]) {
        let error = parse(&[(name, rank)]).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains(&format!("{name}={rank}")), "{error}");
        assert!(error.remedy().unwrap().contains(&format!("RANK=${name}, WORLD_SIZE")), "{error}");
        // What the user then sets.
        assert_eq!(parse(&[&[(name, rank)], &FULL[..]].concat()).unwrap().unwrap().rank.get(), 1);
    }
    assert!(parse(&[("SLURM_PROCID", "1")]).is_err());
    // The size of another launcher counts.
    let slurm = [("PMIX_RANK", "0"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert_eq!(parse(&slurm).unwrap().unwrap().rendezvous, RendezvousEndpoint::NotNeeded);
}

#[test]
fn a_world_of_one_that_may_be_one_of_several_is_doubted() {
    let said = |pairs: &[(&str, &str)]| {
        let owned = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let map = owned(pairs);
        let lookup = |name: &str| map.get(name).cloned();
        doubt_of(parse(pairs).unwrap().as_ref(), &Variables { lookup }, owned(pairs).into_iter())
    };
    assert!(said(&[("NEW_RANK", "2")]).unwrap().contains("NEW_RANK=2 looks like a rank"));
    assert_eq!(said(&[]), None);
    assert_eq!(said(&[&[("NEW_RANK", "2")], &FULL[..]].concat()), None);
    let mut one = vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
    assert_eq!(said(&one), None);
    one.extend([("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")]);
    assert!(said(&one).unwrap().contains("OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=4"));
    one.push(("TORCHELASTIC_RUN_ID", "sweep-2"));
    assert_eq!(said(&one), None);
}

#[test]
fn tasks_of_srun_need_nothing_else() {
    let step = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "5"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ("SLURM_JOB_ID", "123"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "node[1-3]"),
    ];
    let env = parse(&step).unwrap().unwrap();
    let (address, port) = ("node1".to_owned(), 20_123);
    assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
    // Its own PMI (`--mpi=pmi2`) says the same in other names.
    let pmi = [("PMI_RANK", "3"), ("PMI_SIZE", "5")];
    assert_eq!(parse(&[&step[..], &pmi].concat()).unwrap().unwrap(), env);
    // Another step that has the same port by chance does not mix with this one.
    assert_eq!(env.run_id.as_deref(), Some("slurm-123.0.0"));
    let by_hand = [("MASTER_ADDR", "ib-node1"), ("MASTER_PORT", "7")];
    let env = parse(&[&step[..], &by_hand].concat()).unwrap().unwrap();
    let (address, port) = ("ib-node1".to_owned(), 7);
    assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
    assert_eq!(env.run_id.as_deref(), Some("slurm-123.0.0"));
    // A list that cannot be understood is an error only where it is needed.
    let odd = [("SLURM_STEP_NODELIST", "node[")];
    assert!(
        parse(&[&step[..], &odd].concat()).unwrap_err().to_string().contains("SLURM_STEP_NODELIST=node[")
    );
    assert!(parse(&[&step[..], &by_hand, &odd].concat()).is_ok());
    let env = parse(&[&step[..], &[("PHALANX_RENDEZVOUS", "file:///x")]].concat()).unwrap().unwrap();
    assert_eq!(env.rendezvous, RendezvousEndpoint::Url("file:///x".to_owned()));
    // All on one node.
    let one = [("SLURM_STEP_TASKS_PER_NODE", "5"), ("SLURM_NODEID", "0"), ("SLURM_STEP_NODELIST", "node1")];
    let env = parse(&[&step[..], &one].concat()).unwrap().unwrap();
    let (address, port) = ("127.0.0.1".to_owned(), 20_123);
    assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
}

#[test]
fn empty_variables_are_unset() {
    let empty: Vec<(&str, &str)> =
        REQUIRED.iter().chain(&["LOCAL_RANK", "PMIX_RANK", "PHALANX_BIND"]).map(|name| (*name, "")).collect();
    assert_eq!(parse(&empty).unwrap(), None);
}

#[test]
fn a_batch_script_is_no_task() {
    assert_eq!(parse(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_NODEID", "0")]).unwrap(), None);
    let alone = parse(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]).unwrap().unwrap();
    assert_eq!(alone.rendezvous, RendezvousEndpoint::NotNeeded);
}

#[test]
fn open_mpi_on_one_host_needs_no_address() {
    let job = |local_size| {
        [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
            ("PMIX_SERVER_TMPDIR", "/run/ompi.7"),
        ]
    };
    let env = parse(&job("2")).unwrap().unwrap();
    assert_eq!(env.rendezvous, RendezvousEndpoint::Url("file:///run/ompi.7/phalanx".into()));
    assert!(parse(&job("1")).is_err());
}

#[test]
fn mpirun_on_several_hosts_says_where_ranks_meet() {
    let hydra = [
        ("PMI_RANK", "3"),
        ("PMI_SIZE", "5"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
        ("PMI_FD", "11"),
        ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "node2"),
    ];
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "5"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_SERVER_TMPDIR", "/tmp/prted.7"),
        ("PMIX_NAMESPACE", "prterun-login-28@1"),
    ];
    let met = |pairs: &[(&str, &str)], more: &[(&str, &str)]| {
        let env = parse(&[pairs, more].concat()).unwrap().unwrap();
        (env.rendezvous, env.run_id)
    };
    let pmi = |port| (RendezvousEndpoint::Pmi { descriptor: 11, host: Some("node2".into()), port }, None);
    assert_eq!(met(&hydra, &[]), pmi(0));
    assert_eq!(met(&hydra, &[("MASTER_PORT", "7")]), pmi(7));
    assert!(parse(&[&hydra[..], &[("PMI_FD", "none")]].concat()).is_err());
    let (RendezvousEndpoint::HostOfMpirun { address, port }, id) = met(&open_mpi, &[]) else {
        panic!("not at mpirun's host")
    };
    assert_eq!((address.as_str(), id.as_deref()), ("login", Some("mpirun-prterun-login-28@1")));
    assert!(port >= 20_000);
    let (rendezvous, _) = met(&open_mpi, &[("MASTER_PORT", "7")]);
    assert_eq!(rendezvous, RendezvousEndpoint::HostOfMpirun { address, port: 7 });
    // What is said goes before both.
    for pairs in [&hydra[..], &open_mpi] {
        let (rendezvous, _) = met(pairs, &[("MASTER_ADDR", "ib1"), ("MASTER_PORT", "7")]);
        assert_eq!(rendezvous, RendezvousEndpoint::Master { address: "ib1".into(), port: 7 });
        let (rendezvous, _) = met(pairs, &[("PHALANX_RENDEZVOUS", "file:///x")]);
        assert_eq!(rendezvous, RendezvousEndpoint::Url("file:///x".into()));
    }
}

#[test]
fn what_the_launcher_serves_comes_before_a_url() {
    let extra = [
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("PHALANX_RENDEZVOUS", "tcp://h:1"),
        ("PHALANX_BIND", "0.0.0.0"),
    ];
    let env = parse(&with(&extra)).unwrap().unwrap();
    assert!(matches!(env.rendezvous, RendezvousEndpoint::Master { .. }));
    assert_eq!(env.bind, Some("0.0.0.0".parse().unwrap()));
}

#[test]
fn what_a_launcher_sets_is_what_a_worker_reads() {
    let worker = WorkerEnv {
        rank: Rank::new(3),
        local_rank: 1,
        world_size: WorldSize::new(4).unwrap(),
        local_world_size: 2,
        group_rank: 1,
        group_world_size: 2,
        cross: (0, 1),
        role_name: "default".into(),
        role_rank: 1,
        role_world_size: 2,
        master_addr: "10.0.0.1".into(),
        master_port: 29500,
        restart_count: Generation(2),
        max_restarts: 3,
        run_id: "job".into(),
        agent_store: true,
    };
    let variables = worker.variables_given(|name| name == "OMP_NUM_THREADS");
    assert_eq!(variables.len(), 18);
    assert!(variables.contains(&(NUMBERED_STARTS, "10.0.0.1 29500".to_owned())));
    let with_horovod = worker.variables_given(|name| name == HOROVODRUN);
    let value = |name| with_horovod.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
    let names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"];
    assert_eq!(names.map(value), [Some("3"), Some("4"), Some("1"), Some("2")]);
    assert_eq!(["HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"].map(value), [Some("0"), Some("1")]);
    let pairs: Vec<(&str, &str)> = variables.iter().map(|(k, v)| (*k, v.as_str())).collect();
    assert!(pairs.contains(&("ROLE_RANK", "1")) && pairs.contains(&("ROLE_WORLD_SIZE", "2")));
    assert!(pairs.contains(&("RAYON_NUM_THREADS", "1")) && pairs.contains(&("PYTHONUNBUFFERED", "1")));
    assert_eq!(worker.variables_given(|name| name == "PYTHONUNBUFFERED").len(), 18);
    let env = parse(&pairs).unwrap().unwrap();
    assert_eq!(
        (env.rank, env.world_size, env.restart_count),
        (worker.rank, worker.world_size, Generation(2))
    );
    assert_eq!((env.local_rank, env.local_world_size, env.group_rank), (Some(1), Some(2), Some(1)));
    assert_eq!((env.run_id.as_deref(), env.agent_store), (Some("job"), true));
}
