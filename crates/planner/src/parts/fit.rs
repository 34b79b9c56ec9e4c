//! Shares fitted to measured steps.
//!
//! Owns: the split into halves, the search, and the errors of each half. Never: measures; judges by
//! a sample that it fitted to. Invariant: errors are those of one phase and one bucket of sizes
//! each, never of all samples together; the same samples give the same shares.

use super::hardware::Hardware;
use super::worker::WorkerSetup;
use cleave_domain::StepWork;

/// A measured step of decoding, or the steps of a measured prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSample {
    /// Index of its worker among those of the fit.
    pub worker: usize,
    pub phase: SamplePhase,
    pub steps: Vec<StepWork>,
    /// Seconds that they took together.
    pub seconds: f64,
}

/// Phases, whose errors are never pooled, with the size that decides a sample's bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SamplePhase {
    Prefill { tokens: u32 },
    Decode { sequences: u32 },
}

impl SamplePhase {
    /// Name of the phase.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill { .. } => "prefill",
            Self::Decode { .. } => "decode",
        }
    }

    /// Name of the bucket of this size.
    pub fn bucket(self) -> &'static str {
        match self {
            Self::Prefill { tokens: 0..=512 } => "prompts to 512",
            Self::Prefill { tokens: 513..=2048 } => "prompts to 2k",
            Self::Prefill {
                tokens: 2049..=8192,
            } => "prompts to 8k",
            Self::Prefill { .. } => "longer prompts",
            Self::Decode { sequences: 0..=1 } => "1 sequence",
            Self::Decode { sequences: 2..=8 } => "to 8 sequences",
            Self::Decode { sequences: 9..=32 } => "to 32 sequences",
            Self::Decode { .. } => "more sequences",
        }
    }
}

/// The hardware with fitted shares, and how far off it is.
#[derive(Clone, Debug, PartialEq)]
pub struct FitReport {
    pub hardware: Hardware,
    /// By phase and bucket, in the order of sizes.
    pub errors: Vec<PhaseErrors>,
}

/// Errors of predictions for one bucket of one phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseErrors {
    pub phase: &'static str,
    pub bucket: &'static str,
    /// Of the samples that shares were fitted to.
    pub fitted: ErrorSummary,
    /// Of the samples that were held out.
    pub held_out: ErrorSummary,
}

/// Sizes of `predicted / measured - 1`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSummary {
    pub count: usize,
    pub median: f64,
    pub worst: f64,
}

/// Fits the shares of `hardware`, which every worker has, to every second sample of each phase.
///
/// # Errors
/// If there are fewer than four samples of a phase that has any, or a sample took no time.
pub fn fit(
    hardware: &Hardware,
    workers: &[WorkerSetup],
    samples: &[StepSample],
) -> Result<FitReport, String> {
    for sample in samples {
        if !sample.seconds.is_finite() || sample.seconds <= 0.0 {
            return Err(format!("a sample took {} seconds", sample.seconds));
        }
    }
    let (fitted, held_out) = halves(samples)?;
    let mut search = Search {
        hardware: hardware.clone(),
        workers: workers.to_vec(),
        samples: &fitted,
    };
    search.run();
    let Search {
        hardware, workers, ..
    } = search;
    let errors = errors_by_bucket(&workers, &fitted, &held_out);
    Ok(FitReport { hardware, errors })
}

/// Samples in the order of sizes, in turn fitted and held out.
fn halves(samples: &[StepSample]) -> Result<(Vec<&StepSample>, Vec<&StepSample>), String> {
    if samples.is_empty() {
        return Err("there is no sample".to_owned());
    }
    let (mut fitted, mut held_out) = (Vec::new(), Vec::new());
    for name in ["prefill", "decode"] {
        let of_phase = samples.iter().filter(|sample| sample.phase.name() == name);
        let mut of_phase: Vec<&StepSample> = of_phase.collect();
        if (1..4).contains(&of_phase.len()) {
            return Err(format!(
                "{} samples of {name}: at least 4 are needed, half of which are held out",
                of_phase.len()
            ));
        }
        of_phase.sort_by(|one, other| {
            let by_size = (one.phase, one.worker).cmp(&(other.phase, other.worker));
            by_size.then(one.seconds.total_cmp(&other.seconds))
        });
        for (number, sample) in of_phase.into_iter().enumerate() {
            if number % 2 == 0 {
                fitted.push(sample);
            } else {
                held_out.push(sample);
            }
        }
    }
    Ok((fitted, held_out))
}

/// `predicted / measured - 1`.
fn error(workers: &[WorkerSetup], sample: &StepSample) -> f64 {
    let worker = &workers[sample.worker];
    let steps = sample.steps.iter().map(|work| worker.step_seconds(work));
    steps.sum::<f64>() / sample.seconds - 1.0
}

fn errors_by_bucket(
    workers: &[WorkerSetup],
    fitted: &[&StepSample],
    held_out: &[&StepSample],
) -> Vec<PhaseErrors> {
    let mut phases: Vec<SamplePhase> = fitted
        .iter()
        .chain(held_out)
        .map(|sample| sample.phase)
        .collect();
    phases.sort_unstable();
    phases.dedup_by_key(|phase| phase.bucket());
    let of = |samples: &[&StepSample], bucket: &str| {
        let of_bucket = samples.iter().filter(|one| one.phase.bucket() == bucket);
        ErrorSummary::of(of_bucket.map(|sample| error(workers, sample).abs()))
    };
    let row = |phase: SamplePhase| PhaseErrors {
        phase: phase.name(),
        bucket: phase.bucket(),
        fitted: of(fitted, phase.bucket()),
        held_out: of(held_out, phase.bucket()),
    };
    phases.into_iter().map(row).collect()
}

impl ErrorSummary {
    fn of(errors: impl Iterator<Item = f64>) -> Self {
        let mut errors: Vec<f64> = errors.collect();
        errors.sort_by(f64::total_cmp);
        let middle = errors.len() / 2;
        let median = match errors.as_slice() {
            [] => 0.0,
            all if all.len() % 2 == 1 => all[middle],
            all => f64::midpoint(all[middle - 1], all[middle]),
        };
        Self {
            count: errors.len(),
            median,
            worst: errors.last().copied().unwrap_or_default(),
        }
    }
}

/// A search along one quantity at a time, with ever smaller steps.
struct Search<'a> {
    hardware: Hardware,
    workers: Vec<WorkerSetup>,
    samples: &'a [&'a StepSample],
}

/// Quantities that are fitted.
const QUANTITIES: [fn(&mut Hardware, f64); 8] = [
    |device, times| scale(&mut device.shares.weights_read, times),
    |device, times| scale(&mut device.shares.decode_attention, times),
    |device, times| scale(&mut device.shares.prefill_attention, times),
    |device, times| scale(&mut device.shares.experts, times),
    |device, times| scale(&mut device.shares.collectives, times),
    |device, times| scale_nanos(&mut device.shares.layer_nanos, times),
    |device, times| scale_nanos(&mut device.shares.step_nanos, times),
    scale_products,
];

/// The first factor of a quantity, and the one at which the search ends.
const FACTORS: (f64, f64) = (1.5, 1.002);

fn scale(share: &mut f64, times: f64) {
    *share = (*share * times).clamp(0.001, 1.0);
}

fn scale_nanos(nanos: &mut u64, times: f64) {
    // From zero no factor leads away.
    *nanos = ((*nanos).max(1) as f64 * times).round().max(1.0) as u64;
}

/// Scales the shares of all products alike, none above 1.
fn scale_products(device: &mut Hardware, times: f64) {
    for arithmetic in device.arithmetic.values_mut() {
        for (_, share) in &mut arithmetic.shares {
            scale(share, times);
        }
    }
}

impl Search<'_> {
    fn run(&mut self) {
        let mut loss = self.loss();
        let mut factor = FACTORS.0;
        while factor > FACTORS.1 {
            let mut is_better = false;
            for change in QUANTITIES {
                for times in [factor, 1.0 / factor] {
                    let before = self.hardware.clone();
                    change(&mut self.hardware, times);
                    self.spread();
                    let found = self.loss();
                    if found < loss {
                        loss = found;
                        is_better = true;
                        break;
                    }
                    self.hardware = before;
                }
            }
            if !is_better {
                factor = factor.sqrt();
            }
        }
        self.spread();
    }

    fn spread(&mut self) {
        for worker in &mut self.workers {
            worker.hardware = self.hardware.clone();
        }
    }

    /// Mean square of the logarithms of predicted over measured, each phase as heavy as the other.
    fn loss(&self) -> f64 {
        let of_phase = |name: &str| {
            let mut sum = (0.0, 0.0_f64);
            for sample in self.samples.iter().filter(|one| one.phase.name() == name) {
                sum.0 += (1.0 + error(&self.workers, sample)).ln().powi(2);
                sum.1 += 1.0;
            }
            sum.0 / sum.1.max(1.0)
        };
        of_phase("prefill") + of_phase("decode")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::ReachedShares;
    use crate::parts::worker::tests::worker;

    fn decode(worker: usize, sequences: u32, context: u64) -> StepSample {
        StepSample {
            worker,
            phase: SamplePhase::Decode { sequences },
            steps: vec![StepWork {
                rows: sequences,
                pairs: 0,
                context_tokens: u64::from(sequences) * context,
                draws: sequences,
            }],
            seconds: 0.0,
        }
    }

    fn prefill(worker: usize, tokens: u32) -> StepSample {
        let chunk = |before| {
            let mut work = StepWork::prefill(before, 2048.min(tokens - before));
            work.draws = u32::from(before + 2048 >= tokens);
            work
        };
        StepSample {
            worker,
            phase: SamplePhase::Prefill { tokens },
            steps: (0..tokens).step_by(2048).map(chunk).collect(),
            seconds: 0.0,
        }
    }

    fn shapes() -> Vec<StepSample> {
        let decodes = [1, 2, 8, 16, 32, 64, 128]
            .into_iter()
            .flat_map(|sequences| [512, 8192].map(|context| decode(0, sequences, context)));
        let prompts = [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768];
        decodes
            .chain(prompts.map(|tokens| prefill(0, tokens)))
            .collect()
    }

    /// Measures the shapes on a device that has other shares than the catalogue's.
    fn measured(worker: &WorkerSetup) -> Vec<StepSample> {
        let mut samples = shapes();
        for sample in &mut samples {
            let steps = sample.steps.iter().map(|work| worker.step_seconds(work));
            sample.seconds = steps.sum();
        }
        samples
    }

    #[test]
    fn hidden_shares_are_found_again() {
        let start = worker("h100", "llama-3.1-8b", 1);
        let mut real = start.clone();
        real.hardware.shares = ReachedShares {
            weights_read: 0.62,
            prefill_attention: 0.23,
            decode_attention: 0.9,
            step_nanos: 900_000,
            ..real.hardware.shares
        };
        scale_products(&mut real.hardware, 0.7);
        let found = fit(
            &start.hardware,
            std::slice::from_ref(&start),
            &measured(&real),
        )
        .unwrap();
        for bucket in &found.errors {
            assert!(bucket.held_out.worst < 0.03, "{bucket:?}");
            assert!(
                bucket.fitted.count + bucket.held_out.count >= 1,
                "{bucket:?}"
            );
        }
        assert_eq!(found.hardware.check(), Ok(()));
        let attention = found.hardware.shares.prefill_attention;
        assert!((attention / 0.23 - 1.0).abs() < 0.05, "{attention}");
    }

    /// One wrong sample of the half that is held out changes no share, and is seen in its bucket.
    #[test]
    fn held_out_samples_are_not_learned_from() {
        let start = worker("h100", "llama-3.1-8b", 1);
        let good = measured(&start);
        let mut bad = good.clone();
        let (_, held_out) = halves(&good).unwrap();
        let wrong = held_out[0].clone();
        let position = good.iter().position(|sample| *sample == wrong).unwrap();
        bad[position].seconds *= 1.000_001;
        let fits = [&good, &bad]
            .map(|samples| fit(&start.hardware, std::slice::from_ref(&start), samples).unwrap());
        assert_eq!(fits[0].hardware, fits[1].hardware);
        assert_ne!(fits[0].errors, fits[1].errors);
    }

    #[test]
    fn phases_and_buckets_are_judged_apart() {
        let start = worker("h100", "llama-3.1-8b", 1);
        let found = fit(
            &start.hardware,
            std::slice::from_ref(&start),
            &measured(&start),
        )
        .unwrap();
        let names: Vec<_> = found
            .errors
            .iter()
            .map(|one| (one.phase, one.bucket))
            .collect();
        let expected = [
            ("prefill", "prompts to 512"),
            ("prefill", "prompts to 2k"),
            ("prefill", "prompts to 8k"),
            ("prefill", "longer prompts"),
            ("decode", "1 sequence"),
            ("decode", "to 8 sequences"),
            ("decode", "to 32 sequences"),
            ("decode", "more sequences"),
        ];
        assert_eq!(names, expected);
        let counts = found
            .errors
            .iter()
            .map(|one| one.fitted.count + one.held_out.count);
        assert_eq!(counts.sum::<usize>(), shapes().len());
    }

    #[test]
    fn too_few_samples_of_a_phase_are_refused() {
        let start = worker("h100", "llama-3.1-8b", 1);
        let all = measured(&start);
        let few: Vec<StepSample> = all[..3].to_vec();
        let error = fit(&start.hardware, std::slice::from_ref(&start), &few).unwrap_err();
        assert!(error.contains("3 samples of decode"), "{error}");
        assert!(fit(&start.hardware, std::slice::from_ref(&start), &[]).is_err());
        let mut timeless = all;
        timeless[0].seconds = 0.0;
        assert!(fit(&start.hardware, std::slice::from_ref(&start), &timeless).is_err());
    }

    #[test]
    fn errors_have_a_median_and_a_worst() {
        let summary = ErrorSummary::of([0.3, 0.1, 0.2].into_iter());
        assert_eq!(
            (summary.count, summary.median, summary.worst),
            (3, 0.2, 0.3)
        );
        let even = ErrorSummary::of([0.1, 0.3].into_iter());
        assert!((even.median - 0.2).abs() < 1e-12);
    }
}
