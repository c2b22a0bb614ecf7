//! The functions that other ranks can call, by name.

use std::any::type_name;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::objects::Value;
use super::payload::{Received, Written, read};
use super::{Context, Shared};
use crate::error::{Error, Result, panic_message};
use crate::rank::Rank;
use crate::wire::rpc::{Head, MAX_NAME};

/// A function of its arguments as they have come.
type Plain = dyn Fn(&Context, &Arguments) -> Result<Written> + Send + Sync;
type Deferred = dyn Fn(&Context, &Arguments, Pledge) -> Result<()> + Send + Sync;
type Object = dyn Fn(&Context, &Arguments) -> Result<Value> + Send + Sync;
type Method = dyn Fn(&Context, &Value, &Arguments) -> Result<Written> + Send + Sync;

/// The arguments of a call: what follows the name of the function in its payload.
pub(super) struct Arguments {
    pub payload: Arc<Received>,
    pub begin: usize,
}

/// What a name stands for.
pub(super) enum Function {
    Plain(Box<Plain>),
    Deferred(Box<Deferred>),
    Object(Box<Object>),
    Method(Box<Method>),
}

#[derive(Default)]
pub(super) struct Registry(HashMap<String, Function>);

impl Registry {
    pub(super) fn add(&mut self, name: &str, function: Function) -> Result<()> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Error::invalid_argument(format!(
                "the name of a function has 1 to {MAX_NAME} bytes, and {name:?} has {}",
                name.len()
            ))
            .with_remedy("give it a shorter name that is not empty"));
        }
        match self.0.insert(name.to_owned(), function) {
            None => Ok(()),
            Some(_) => Err(Error::invalid_argument(format!("two functions have the name {name:?}"))
                .with_remedy("register each name once, whether by handler, deferred, object or method")),
        }
    }

    pub(super) fn get(&self, name: &str, context: &Context) -> Result<&Function> {
        self.0.get(name).ok_or_else(|| {
            let mut known: Vec<&str> =
                self.0.keys().map(String::as_str).filter(|name| !name.starts_with("phalanx.")).collect();
            known.sort_unstable();
            Error::invalid_argument(format!(
                "rank {} has no function {name:?}, which rank {} has called; it has {}",
                context.rpc().rank(),
                context.caller(),
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            ))
            .with_remedy("register it on every rank that is called, with RpcBuilder::handler")
        })
    }
}

/// A typed function as one of bytes.
pub(super) fn plain<A: DeserializeOwned, R: Serialize>(
    name: &str,
    function: impl Fn(&Context, A) -> Result<R> + Send + Sync + 'static,
) -> Function {
    let name = name.to_owned();
    Function::Plain(Box::new(move |context, args| {
        write_result(&name, &function(context, arguments(&name, context, args)?)?)
    }))
}

pub(super) fn deferred<A: DeserializeOwned, R: Serialize>(
    name: &str,
    function: impl Fn(&Context, A, Answer<R>) + Send + Sync + 'static,
) -> Function {
    let name = name.to_owned();
    Function::Deferred(Box::new(move |context, args, pledge| {
        match arguments(&name, context, args) {
            Ok(arguments) => {
                function(context, arguments, Answer::new(pledge));
            }
            Err(error) => pledge.keep(Err(error)),
        }
        Ok(())
    }))
}

pub(super) fn object<A: DeserializeOwned, T: Send + Sync + 'static>(
    name: &str,
    function: impl Fn(&Context, A) -> Result<T> + Send + Sync + 'static,
) -> Function {
    let name = name.to_owned();
    Function::Object(Box::new(move |context, args| {
        Ok(Arc::new(function(context, arguments(&name, context, args)?)?))
    }))
}

pub(super) fn method<T: Send + Sync + 'static, A: DeserializeOwned, R: Serialize>(
    name: &str,
    function: impl Fn(&Context, &T, A) -> Result<R> + Send + Sync + 'static,
) -> Function {
    let name = name.to_owned();
    Function::Method(Box::new(move |context, value, args| {
        let Some(value) = value.downcast_ref::<T>() else {
            return Err(Error::mismatch(format!(
                "{name:?} is a function of {}, and the object that rank {} has called it on is another",
                type_name::<T>(),
                context.caller()
            )));
        };
        write_result(&name, &function(context, value, arguments(&name, context, args)?)?)
    }))
}

fn arguments<A: DeserializeOwned>(name: &str, context: &Context, args: &Arguments) -> Result<A> {
    read(&args.payload, args.begin).map_err(|why| {
        Error::mismatch(format!(
            "rank {} cannot read the arguments of {name:?} that rank {} has sent as {}: {why}",
            context.rpc().rank(),
            context.caller(),
            type_name::<A>()
        ))
        .with_remedy("caller and handler must have the same types")
    })
}

fn write_result<R: Serialize>(name: &str, result: &R) -> Result<Written> {
    Written::behind(Vec::new(), result, &format!("the result of {name:?}"))
}

/// The duty to answer a call. If it is dropped, the caller gets an error.
///
/// It does not keep the calls: a handler may keep it for ever, and the calls keep the handlers. What is not answered when they have
/// ended has no reader.
pub(super) struct Pledge {
    shared: Weak<Shared>,
    to: Rank,
    head: Head,
    name: String,
    is_kept: bool,
}

impl Pledge {
    pub(super) fn new(shared: &Arc<Shared>, to: Rank, head: Head, name: String) -> Self {
        Self { shared: Arc::downgrade(shared), to, head, name, is_kept: false }
    }

    pub(super) fn keep(mut self, outcome: Result<Written>) {
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: Result<Written>) {
        if !std::mem::replace(&mut self.is_kept, true)
            && let Some(shared) = self.shared.upgrade()
        {
            let outcome = outcome.map_err(|error| shared.named(error, &self.name, self.to));
            shared.answer(self.to, &self.head, outcome);
        }
    }
}

impl Drop for Pledge {
    fn drop(&mut self) {
        let cause = match std::thread::panicking() {
            true => "the handler panicked before it answered",
            false => "the handler has dropped the call without an answer",
        };
        self.finish(Err(Error::aborted(cause)));
    }
}

/// The answer to a call, which a [deferred](super::RpcBuilder::deferred) handler gives when it can: now, or later from
/// another thread. If it is dropped, the caller gets an error.
pub struct Answer<R> {
    pledge: Pledge,
    _result: PhantomData<fn(R)>,
}

impl<R> Answer<R> {
    pub(super) fn new(pledge: Pledge) -> Self {
        Self { pledge, _result: PhantomData }
    }
}

impl<R: Serialize> Answer<R> {
    /// Answers the call.
    pub fn send(self, outcome: Result<R>) {
        let written = outcome.and_then(|result| write_result(&self.pledge.name, &result));
        self.pledge.keep(written);
    }
}

impl<R> std::fmt::Debug for Answer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({:?} to rank {})", self.pledge.name, self.pledge.to)
    }
}

/// What [`caught`] usually runs, for its errors.
pub(super) const HANDLER: &str = "the handler";

/// Runs the program's code, which errors call `what`. A panic becomes an error.
pub(crate) fn caught<R>(what: &str, code: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(code)).unwrap_or_else(|panic| {
        Err(Error::aborted(format!("{what} panicked: {}", panic_message(&*panic)))
            .with_remedy("see the output of the rank that was called"))
    })
}
