//! What routers say and hear.
//!
//! Owns: carrying out a router brain's outputs. Never: decides.
//! Invariant: a fence takes effect at once, and its answer comes soon, but not before everything else.

use crate::run::{Event, RouterSeat, Run, Word};
use crate::tape::{self, Line};
use crate::words;
use crate::world::Wish;
use cleave_domain::{Ending, Refusal, Tape, TapeLine, WorkerRef};
use cleave_router::Readiness;

impl Run<'_> {
    // === clients and operators ===

    pub(crate) fn stall(&mut self, client: usize) -> Result<Option<String>, String> {
        let Some(flight) = self.clients.turn(client, Some(self.now)) else {
            return Ok(None);
        };
        let router = self.clients.all[client].router;
        self.router_hears(router, cleave_router::Input::Stalled { flight })?;
        self.count("stalled");
        Ok(Some(format!("r{:x} stalled     {flight}", router + 1)))
    }

    pub(crate) fn flow(&mut self, client: usize) -> Result<Option<String>, String> {
        let since = self.clients.all[client].stalled;
        let Some(flight) = self.clients.turn(client, None) else {
            return Ok(None);
        };
        let waited = since.map(|since| self.now.since(since));
        let limit = self.world.router.reader_wait_max;
        if waited.is_some_and(|waited| waited > limit) {
            return Err(format!("{flight} was not read for {waited:?}, and goes on"));
        }
        let router = self.clients.all[client].router;
        self.router_hears(router, cleave_router::Input::Flowing { flight })?;
        Ok(Some(format!("r{:x} flowing     {flight}", router + 1)))
    }

    pub(crate) fn wish(&mut self, wish: usize) -> Result<Option<String>, String> {
        let Wish {
            router,
            worker,
            command,
            ..
        } = self.world.wishes[wish];
        if self.routers[router].down_until.is_some() {
            return Ok(None);
        }
        let worker = crate::run::life(worker, 0).worker;
        let input = cleave_router::Input::Commanded { worker, command };
        self.router_hears(router, input)?;
        self.count("wishes");
        Ok(Some(format!(
            "r{:x} commanded   {worker} {command:?}",
            router + 1
        )))
    }

    // === the brain ===

    pub(crate) fn router_told(
        &mut self,
        router: usize,
        from: WorkerRef,
        word: Word,
    ) -> Result<String, String> {
        match word {
            Word::Token(handoff, emission) => {
                let words = format!(
                    "r{:x} token       {handoff} #{} = {} from {}",
                    router + 1,
                    emission.index,
                    emission.sampled.token,
                    from.worker
                );
                self.clients.token(handoff, emission)?;
                Ok(words)
            }
            Word::Report(report) => {
                let words = format!(
                    "r{:x} told        {from} {}",
                    router + 1,
                    words::report(&report)
                );
                let input = cleave_router::Input::Told {
                    worker: from,
                    report,
                };
                self.router_hears(router, input)?;
                Ok(words)
            }
        }
    }

    pub(crate) fn router_hears(
        &mut self,
        router: usize,
        input: cleave_router::Input,
    ) -> Result<(), String> {
        let seat = &mut self.routers[router];
        let at = self.now;
        let asked = matches!(input, cleave_router::Input::Submitted { .. });
        if seat.tape.is_some() {
            let input = input.clone();
            seat.record(&Tape::Router(TapeLine::Heard { at, input }));
        }
        seat.brain.handle(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = seat.brain.poll() {
            if seat.tape.is_some() {
                let output = output.clone();
                seat.record(&Tape::Router(TapeLine::Said { output }));
            }
            outputs.push(output);
        }
        seat.brain.check();
        let wake = seat.brain.deadline();
        if let Some(wake) = wake.filter(|w| seat.wake.is_none_or(|planned| *w < planned)) {
            seat.wake = Some(wake);
            self.plan(wake, Event::WakeRouter(router));
        }
        for output in outputs {
            if asked && finds_nobody(&output) && self.routers[router].readiness == Readiness::Ready
            {
                return Err(format!("r{:x} is ready and knows no worker", router + 1));
            }
            self.router_says(router, output)?;
        }
        Ok(())
    }

    /// Who keeps the clients' streams answers soon, and other facts may come first.
    fn counted(&mut self, router: usize, counted: cleave_router::Input) {
        let soon = self.now + self.dice.micros(0, 500);
        let life = self.routers[router].id;
        self.plan(soon, Event::RouterHears(life, counted));
    }

    fn router_says(&mut self, router: usize, output: cleave_router::Output) -> Result<(), String> {
        match output {
            cleave_router::Output::Tell { worker, order } => {
                self.order(router, worker, order);
            }
            cleave_router::Output::Fence { handoff } => {
                let generated = self.clients.fence(handoff)?.into();
                self.count("fenced");
                self.counted(router, cleave_router::Input::Counted { handoff, generated });
            }
            cleave_router::Output::Count { handoff } => {
                let generated = self.clients.count(handoff.flight)?.into();
                self.counted(router, cleave_router::Input::Counted { handoff, generated });
            }
            cleave_router::Output::End {
                flight,
                ending,
                output_tokens,
                timing: _,
            } => self.clients.end(flight, ending, output_tokens)?,
            cleave_router::Output::Readiness(readiness) => {
                self.routers[router].readiness = readiness;
            }
            cleave_router::Output::Drained => self.routers[router].drained = true,
            cleave_router::Output::Want(_) => self.count("wanted"),
            cleave_router::Output::Note(cleave_router::Note::CancelFreed {
                flight, took, ..
            }) if self.world.undisturbed() && took > self.world.cancel_max() => {
                return Err(format!(
                    "{flight} was cancelled and held blocks for {took:?}"
                ));
            }
            cleave_router::Output::Note(note) => self.count(match note {
                cleave_router::Note::Placed { .. } => "placed",
                cleave_router::Note::PassedOver { .. } => "passed over",
                cleave_router::Note::Decided(_) => "decided",
                cleave_router::Note::Judged { .. } => "judged",
                cleave_router::Note::Stale { .. } => "stale",
                cleave_router::Note::Retried { .. } => "retried",
                cleave_router::Note::CancelFreed { .. } => "cancel freed",
                cleave_router::Note::Moving { .. } => "moving",
                cleave_router::Note::Moved { .. } => "moved",
                cleave_router::Note::Stayed { .. } => "stayed",
                cleave_router::Note::WorkerStuck { .. } => "workers stuck",
                cleave_router::Note::Fleet { workers, .. } => {
                    self.routers[router].workers = workers.total();
                    return Ok(());
                }
            }),
        }
        Ok(())
    }

    pub(crate) fn wake_router(&mut self, router: usize) -> Result<Option<String>, String> {
        let seat = &mut self.routers[router];
        // A deadline may have passed before it was set.
        if seat.wake.is_none_or(|at| at > self.now) {
            return Ok(None);
        }
        seat.wake = None;
        self.router_hears(router, cleave_router::Input::Woke)?;
        Ok(Some(format!("r{:x} woke", router + 1)))
    }
}

impl RouterSeat {
    fn record(&mut self, line: &Line) {
        if let Some(tape) = &mut self.tape {
            tape.push(tape::write(line));
        }
    }
}

/// Whether a flight is turned away because no worker could serve it.
fn finds_nobody(output: &cleave_router::Output) -> bool {
    matches!(
        output,
        cleave_router::Output::End {
            ending: Ending::Refused(Refusal::NoWorker),
            ..
        }
    )
}
