//! One error type. Clones are cheap, so that all waiting callers of a failed operation get the same cause.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::rank::{Rank, Sequence};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, in which operation, because of which peer, and the remedy.
///
/// The kind is private: use [`is_timeout`](Self::is_timeout), [`peer`](Self::peer) and so on, so that new
/// causes never break a `match`.
///
/// ```
/// use phalanx::Error;
/// fn give_up(error: &Error) -> bool {
///     !error.is_timeout() && error.peer().is_none()
/// }
/// ```
///
/// A program makes an error of its own with [`Error::other`].
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: Kind,
    cause: String,
    site: Option<Site>,
    operation: Option<String>,
    sequence: Option<Sequence>,
    peer: Option<Rank>,
    remedy: Option<String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    /// Whether it is about calls before this one, whose difference another error may name.
    is_of_history: bool,
}

/// The rank that reports the error, and its host.
#[derive(Clone, Debug)]
struct Site {
    rank: Rank,
    host: String,
}

/// The private kind behind the predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Kind {
    /// A deadline passed.
    Timeout,
    /// A peer died, or its connection broke.
    PeerFailed,
    /// A peer ended its part of the job while others still waited for it.
    PeerLeft,
    /// Ranks called different collectives, or have different models.
    Mismatch,
    /// The caller made a mistake.
    InvalidArgument,
    /// A variable of the launcher is missing or malformed.
    Environment,
    /// The requested port is in use.
    AddressInUse,
    /// A peer or a file says what this version does not know or does not allow.
    Protocol,
    /// The system refused an operation.
    Io,
    /// An operation or a group was ended for another reason, such as a program's abort.
    Aborted,
    /// A worker of a launcher failed.
    WorkerFailed,
    /// There was too little memory.
    OutOfMemory,
    /// The workers of an elastic job form a new group, and nothing has failed.
    Regrouping,
}

impl Error {
    /// An error of the program itself, from a text or another error, which becomes its [source](StdError::source).
    /// [`is_aborted`](Self::is_aborted) is true for it. Other ranks see it if the function that returns it ends the
    /// group, such as the body of a `join`, or if it is passed to `ProcessGroup::abort`.
    ///
    /// ```
    /// use phalanx::{Error, Result};
    ///
    /// fn checked(loss: f32) -> Result<f32> {
    ///     if loss.is_nan() {
    ///         return Err(Error::other("the loss is NaN").with_remedy("lower the learning rate"));
    ///     }
    ///     Ok(loss)
    /// }
    ///
    /// fn samples(path: &str) -> Result<Vec<u8>> {
    ///     std::fs::read(path).map_err(Error::other)
    /// }
    ///
    /// assert_eq!(checked(f32::NAN).unwrap_err().to_string(), "the loss is NaN (lower the learning rate)");
    /// assert_eq!(samples("/no/such/file").unwrap_err().io_kind(), Some(std::io::ErrorKind::NotFound));
    /// ```
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let source = Arc::from(error.into());
        // The source contains the whole message.
        Self::new(Kind::Aborted, "").edit(|inner| inner.source = Some(source))
    }

    /// An error for the caller's mistake: a wrong shape, an option out of range, a call out of order.
    /// [`is_invalid_argument`](Self::is_invalid_argument) is true for it. It is for adapters, as are [`mismatch`](Self::mismatch) and
    /// [`aborted`](Self::aborted).
    ///
    /// ```
    /// use phalanx::Error;
    /// let error = Error::invalid_argument("max_norm is -1").with_remedy("give a positive number");
    /// assert!(error.is_invalid_argument());
    /// assert_eq!(error.to_string(), "max_norm is -1 (give a positive number)");
    /// ```
    pub fn invalid_argument(cause: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, cause)
    }

    /// An error for ranks, or a saved state and a model, that differ. [`is_mismatch`](Self::is_mismatch) is true for it.
    pub fn mismatch(cause: impl Into<String>) -> Self {
        Self::new(Kind::Mismatch, cause)
    }

    /// An error for an operation, or a group, that was ended for another reason. [`is_aborted`](Self::is_aborted) is true for it.
    pub fn aborted(cause: impl Into<String>) -> Self {
        Self::new(Kind::Aborted, cause)
    }

    /// Notes that rank `peer` is to blame: [`peer`](Self::peer) gives it.
    pub fn with_peer(self, peer: Rank) -> Self {
        self.edit(|inner| inner.peer = Some(peer))
    }

    /// Adds the remedy.
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        self.edit(|inner| inner.remedy = Some(remedy.into()))
    }

    /// Adds the error of a library from which it came.
    pub fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.edit(|inner| inner.source = Some(Arc::new(source)))
    }

    fn edit(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// The system's error kind, if it came from the system: a program was not found, access was denied.
    pub fn io_kind(&self) -> Option<std::io::ErrorKind> {
        self.0.source.as_ref()?.downcast_ref::<std::io::Error>().map(std::io::Error::kind)
    }

    /// Whether a deadline passed.
    pub fn is_timeout(&self) -> bool {
        self.0.kind == Kind::Timeout
    }

    /// Whether a peer died, or its connection broke.
    pub fn is_peer_failure(&self) -> bool {
        self.0.kind == Kind::PeerFailed
    }

    /// Whether a peer ended its part of the job while others still waited for it.
    pub fn is_peer_left(&self) -> bool {
        self.0.kind == Kind::PeerLeft
    }

    /// Whether the ranks called different collectives, or have different models.
    pub fn is_mismatch(&self) -> bool {
        self.0.kind == Kind::Mismatch
    }

    /// Whether it was the caller's own mistake.
    pub fn is_invalid_argument(&self) -> bool {
        self.0.kind == Kind::InvalidArgument
    }

    /// Whether a variable of the launcher is missing or malformed.
    pub fn is_environment(&self) -> bool {
        self.0.kind == Kind::Environment
    }

    /// Whether the requested port is in use.
    pub fn is_address_in_use(&self) -> bool {
        self.0.kind == Kind::AddressInUse
    }

    /// Whether a program on some rank aborted the group.
    pub fn is_aborted(&self) -> bool {
        self.0.kind == Kind::Aborted
    }

    /// Whether a worker failed.
    pub fn is_worker_failure(&self) -> bool {
        self.0.kind == Kind::WorkerFailed
    }

    /// Whether there was too little memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.0.kind == Kind::OutOfMemory
    }

    /// Whether the workers of an elastic job form a new group. If so, nothing has failed.
    pub fn is_regrouping(&self) -> bool {
        self.0.kind == Kind::Regrouping
    }

    /// The rank to blame, if one is known.
    pub fn peer(&self) -> Option<Rank> {
        self.0.peer
    }

    /// The rank that reported it first.
    pub fn rank(&self) -> Option<Rank> {
        self.0.site.as_ref().map(|site| site.rank)
    }

    /// The host of [`rank`](Self::rank).
    pub fn host(&self) -> Option<&str> {
        self.0.site.as_ref().map(|site| site.host.as_str())
    }

    /// The operation in which it happened, as the user called it.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// The number of that operation in its group.
    pub fn sequence(&self) -> Option<Sequence> {
        self.0.sequence
    }

    /// The remedy.
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }
}

// Users do not see what follows.
#[doc(hidden)]
impl Error {
    // The next four are for adapters and commands, which report errors as `phalanx` does.

    /// For a deadline that has passed, such as one of a `Store`.
    pub fn timeout(cause: impl Into<String>) -> Self {
        Self::new(Kind::Timeout, cause)
    }

    /// For a variable that is missing or malformed.
    pub fn environment(cause: impl Into<String>) -> Self {
        Self::new(Kind::Environment, cause)
    }

    /// For memory that is not there.
    pub fn out_of_memory(cause: impl Into<String>) -> Self {
        Self::new(Kind::OutOfMemory, cause)
    }

    /// Adds the operation, and the number of the group's call, in which it happened.
    pub fn in_operation(self, operation: impl Into<String>, sequence: Option<Sequence>) -> Self {
        self.edit(|inner| {
            inner.operation = Some(operation.into());
            inner.sequence = sequence;
        })
    }

    // The others are for `phalanx`: what makes errors, what adds to them, and what tells them apart.

    /// An error of this kind, which has nothing but a cause.
    pub fn new(kind: Kind, cause: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            cause: cause.into(),
            site: None,
            operation: None,
            sequence: None,
            peer: None,
            remedy: None,
            source: None,
            is_of_history: false,
        }))
    }

    /// For an elastic job whose workers form a new group.
    pub fn regrouping(cause: &str) -> Self {
        Self::new(Kind::Regrouping, cause)
            .with_remedy("return this error to elastic::run, which goes on with the new group")
    }

    /// For bytes, or for peers, that do not follow the protocol.
    pub fn protocol(cause: impl Into<String>) -> Self {
        Self::new(Kind::Protocol, cause)
    }

    /// For what no process of this build writes, in a peer's bytes or in the store.
    pub fn malformed(cause: impl Into<String>) -> Self {
        Self::protocol(cause).with_remedy(
            "start all processes of the job with the same build; does another program, or another job of this name, use its store or \
             its ports?",
        )
    }

    /// For a value of the caller that cannot be written as bytes.
    pub fn not_serialized(cause: impl Into<String>, source: impl StdError + Send + Sync + 'static) -> Self {
        Self::invalid_argument(cause).with_source(source).with_remedy(
            "its type must tell serde each length before the elements: `#[serde(flatten)]` does not, for one",
        )
    }

    /// For an operation that the system refused. The kind, and if files or sockets have run out the remedy, follow from `source`.
    pub fn io(cause: impl Into<String>, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match source.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Kind::Timeout,
            ErrorKind::AddrInUse => Kind::AddressInUse,
            _ => Kind::Io,
        };
        let error = Self::new(kind, cause);
        let error = no_more_files(&source).into_iter().fold(error, Self::with_remedy);
        error.with_source(source)
    }

    /// For a thread or a process that the system refuses to start.
    pub fn not_started(cause: impl Into<String>, source: std::io::Error) -> Self {
        let error = Self::new(Kind::Io, cause);
        let hint = no_more_processes(&source).or(no_more_files(&source));
        hint.into_iter().fold(error, Self::with_remedy).with_source(source)
    }

    /// For a thread of this project that has panicked.
    pub fn panicked(cause: impl Into<String>) -> Self {
        Self::aborted(cause).with_remedy(
            "standard error says where it panicked, which is a fault of Phalanx: please report it, and start the job again",
        )
    }

    /// Adds the rank that reports it, and its host.
    pub fn at(self, rank: Rank, host: impl Into<String>) -> Self {
        self.edit(|inner| inner.site = Some(Site { rank, host: host.into() }))
    }

    /// Adds to the cause.
    pub fn adding(self, more: impl AsRef<str>) -> Self {
        self.edit(|inner| inner.cause.push_str(more.as_ref()))
    }

    /// Adds the number of the group's call, before it is known in which operation of this rank it happened.
    pub(crate) fn with_sequence(self, sequence: Sequence) -> Self {
        self.edit(|inner| inner.sequence = Some(sequence))
    }

    /// Notes that the ranks' calls are the same, but not all before them.
    pub(crate) fn of_history(self) -> Self {
        self.edit(|inner| inner.is_of_history = true)
    }

    /// Adds the remedy, unless the error has one: what causes it here is known better where it arose.
    pub fn with_remedy_if_none(self, remedy: impl Into<String>) -> Self {
        if self.remedy().is_some() { self } else { self.with_remedy(remedy) }
    }

    /// The same without its remedy, to be quoted in another error.
    pub fn without_remedy(self) -> Self {
        self.edit(|inner| inner.remedy = None)
    }

    /// The kind behind the predicates.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The system's error number, if it came from the system.
    pub fn errno(&self) -> Option<i32> {
        self.0.source.as_ref()?.downcast_ref::<std::io::Error>()?.raw_os_error()
    }

    /// The cause alone; empty if the source has the whole message.
    pub fn cause(&self) -> &str {
        &self.0.cause
    }

    /// The cause with its source, as one text.
    pub fn full_cause(&self) -> String {
        match &self.0.source {
            Some(source) if self.0.cause.is_empty() => source.to_string(),
            Some(source) => format!("{}: {source}", self.0.cause),
            None => self.0.cause.clone(),
        }
    }

    /// Whether the ranks' calls are the same, but not all before them.
    pub fn is_of_history(&self) -> bool {
        self.0.is_of_history
    }

    /// Whether this process, or its host, lacks what the call needs: no peer is to blame.
    pub fn is_local_shortage(&self) -> bool {
        self.0.source.as_ref().and_then(|source| source.downcast_ref()).is_some_and(is_local_shortage)
    }

    /// For the cause of a group's failure: whether another rank than `me` is to blame, so that the others can go on without it.
    /// If calls or states differ, going on would only repeat the failure.
    pub fn is_a_peers(&self, me: Rank) -> bool {
        let lost = self.is_peer_failure() || self.is_peer_left() || self.is_timeout();
        let own = self.rank().is_none_or(|rank| rank == me);
        lost || !(own || self.is_mismatch() || self.is_invalid_argument())
    }

    /// The other rank whose failure came first, as seen by `me`: it is gone, or it has failed by itself and reported
    /// this.
    pub fn culprit(&self, me: Rank) -> Option<Rank> {
        let gone = self.is_peer_failure() || self.is_peer_left();
        let culprit = if gone { self.peer() } else { self.rank() };
        culprit.filter(|rank| *rank != me)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { cause, site, operation, sequence, remedy, source, .. } = &*self.0;
        if let Some(Site { rank, host }) = site {
            write!(f, "rank {rank} ({host}): ")?;
        }
        if let Some(operation) = operation {
            f.write_str(operation)?;
            if let Some(sequence) = sequence {
                write!(f, " {sequence}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(cause)?;
        match source {
            Some(source) if cause.is_empty() => write!(f, "{source}")?,
            Some(source) => write!(f, ": {source}")?,
            None => {}
        }
        if let Some(remedy) = remedy {
            write!(f, " ({remedy})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    // `fn main() -> Result<(), phalanx::Error>` prints the debug form, so it must be readable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        // The message already contains the source; its own source comes next.
        self.0.source.as_ref().and_then(|source| source.source())
    }
}

/// What a panic says, of the value that it leaves behind.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Whether `error` says that this process, or its host, has no file descriptors or no memory left.
pub fn is_local_shortage(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

/// The remedy if `error` says that this process, or its host, has no file descriptors left. [`Error::io`] adds it
/// if the caller has no remedy of its own.
pub fn no_more_files(error: &std::io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => Some("this process may open no more files and sockets: raise `ulimit -n`"),
        libc::ENFILE => Some("this host may open no more files and sockets: raise the sysctl fs.file-max"),
        _ => None,
    }
}

/// The remedy if `error`, of connecting to `target`, says that this host's loopback is down, as in a new network namespace. Only of
/// IPv4: the loopback of IPv6 may be disabled by itself.
pub fn loopback_is_down(target: &SocketAddr, error: &std::io::Error) -> Option<&'static str> {
    let is_down =
        target.is_ipv4() && target.ip().is_loopback() && error.raw_os_error() == Some(libc::ENETUNREACH);
    is_down.then_some(LOOPBACK_IS_DOWN)
}

/// What [`loopback_is_down`] says.
pub const LOOPBACK_IS_DOWN: &str =
    "the loopback interface is down, as in a new network namespace: `ip link set lo up`";

/// The remedy if `error`, of starting a process or a thread, says that no more may be started. For other calls the same
/// error may mean something else.
pub fn no_more_processes(error: &std::io::Error) -> Option<&'static str> {
    let hint = "this user, or this container, may start no more processes and threads: raise `ulimit -u`, or pids.max of \
                the cgroup";
    (error.raw_os_error()? == libc::EAGAIN).then_some(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_that_is_down_is_named() {
        let refused = std::io::Error::from_raw_os_error;
        let hint = |target: &str, errno| loopback_is_down(&target.parse().unwrap(), &refused(errno));
        assert!(hint("127.0.0.1:1", libc::ENETUNREACH).unwrap().contains("ip link set lo up"));
        assert_eq!(hint("127.0.0.1:1", libc::ECONNREFUSED), None);
        assert_eq!(hint("[::1]:1", libc::ENETUNREACH), None);
        assert_eq!(hint("10.0.0.7:1", libc::ENETUNREACH), None);
    }

    #[test]
    fn a_limit_of_the_system_is_named_with_what_raises_it() {
        let refused = std::io::Error::from_raw_os_error;
        let remedy = |error: &Error| error.remedy().unwrap_or_default().to_owned();
        let files = Error::io("cannot listen", refused(libc::EMFILE));
        assert!(remedy(&files).contains("`ulimit -n`"), "{files}");
        assert!(remedy(&Error::io("cannot listen", refused(libc::ENFILE))).contains("fs.file-max"));
        assert_eq!(
            remedy(&files.with_remedy("three files a rank: `ulimit -n`")),
            "three files a rank: `ulimit -n`"
        );
        let threads = Error::not_started("cannot start a thread", refused(libc::EAGAIN));
        assert!(remedy(&threads).contains("`ulimit -u`") && !threads.is_timeout(), "{threads}");
        assert!(
            remedy(&Error::not_started("cannot start sh", refused(libc::EMFILE))).contains("`ulimit -n`")
        );
        // For a socket it means that there is no data yet.
        assert!(Error::io("cannot read", refused(libc::EAGAIN)).remedy().is_none());
    }

    #[test]
    fn what_this_build_does_not_write_and_what_cannot_be_written_have_a_remedy() {
        let strange = Error::malformed("a frame has the unknown type 9");
        assert!(
            strange.kind() == Kind::Protocol && strange.remedy().unwrap().contains("same build"),
            "{strange}"
        );
        // A better one, where it is known, takes its place.
        assert_eq!(strange.with_remedy("give all the same key").remedy(), Some("give all the same key"));
        let source = std::io::Error::other("the length is not known");
        let unwritten = Error::not_serialized("the object could not be written", source);
        let said = unwritten.to_string();
        assert!(
            unwritten.is_invalid_argument() && said.contains("written: the length is not known ("),
            "{said}"
        );
    }

    #[test]
    fn a_panic_of_a_thread_says_where_more_is_said() {
        let error = Error::panicked("a thread has panicked");
        assert!(error.is_aborted() && error.remedy().unwrap().contains("standard error"), "{error}");
    }

    #[test]
    fn a_panic_says_its_text_and_one_of_another_value_has_none() {
        let panics: [(Box<dyn Any + Send>, &str); 3] = [
            (Box::new("a text"), "a text"),
            (Box::new("a text that was made".to_owned()), "a text that was made"),
            (Box::new(7), "without a message"),
        ];
        for (panic, said) in panics {
            assert_eq!(panic_message(&*panic), said);
        }
    }

    #[test]
    fn a_message_names_rank_host_operation_sequence_cause_and_remedy() {
        let error = Error::timeout("rank 1 did not answer within 2 s")
            .with_peer(Rank::new(1))
            .in_operation("all_reduce(sum, f32, 4 elements)", Some(Sequence(17)))
            .at(Rank::MAIN, "node7")
            .with_remedy("is rank 1 alive?");
        assert_eq!(
            error.to_string(),
            "rank 0 (node7): all_reduce(sum, f32, 4 elements) #17: rank 1 did not answer within 2 s (is rank 1 alive?)"
        );
        assert!(error.is_timeout() && !error.is_mismatch());
        assert_eq!(error.clone().peer(), Some(Rank::new(1)));
    }

    #[test]
    fn a_program_s_own_error_says_what_it_says_and_once() {
        let plain = Error::other("the loss is NaN");
        assert_eq!(plain.to_string(), "the loss is NaN");
        assert!(plain.is_aborted());
        let disk = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let text = disk.to_string();
        let wrapped = Error::other(disk).in_operation("barrier", None).at(Rank::MAIN, "node7");
        assert_eq!(wrapped.to_string(), format!("rank 0 (node7): barrier: {text}"));
        assert_eq!(wrapped.full_cause(), text, "which is what the other ranks are told");
        assert_eq!(wrapped.io_kind(), Some(std::io::ErrorKind::StorageFull));
        // An error of this crate is kept as it is.
        let own = Error::timeout("late").with_peer(Rank::new(1));
        assert!(Error::other(own).to_string().contains("late"));
    }
}
