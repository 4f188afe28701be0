//! Programs run by an interpreter, against their decisions.

use super::assemble::{JUMP, X32, X86_64};
use super::*;

const X86: u32 = 0x4000_0003;

fn holds(one: Comparison, args: &[u64; 6]) -> bool {
    let arg = args[one.index as usize];
    match one.op {
        Operator::NotEqual => arg != one.value,
        Operator::Less => arg < one.value,
        Operator::LessOrEqual => arg <= one.value,
        Operator::Equal => arg & one.mask == one.value,
        Operator::GreaterOrEqual => arg >= one.value,
        Operator::Greater => arg > one.value,
    }
}

/// Returns the action for a call with a number below those of x32.
fn expected(rules: &Rules, number: u32, args: &[u64; 6]) -> Action {
    match rules.calls.get(&number) {
        Some(Decision::Always(action)) => *action,
        Some(Decision::Cases(cases)) => {
            let held = cases.iter().find(|(all, _)| all.iter().all(|one| holds(*one, args)));
            held.map_or(rules.default, |(_, action)| *action)
        }
        None if number >= rules.above.0 => rules.above.1,
        None => rules.default,
    }
}

/// Pseudo-random numbers (xorshift), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Values whose halves are alike, so that comparisons of both halves decide.
    fn value(&mut self) -> u64 {
        let half = [0, 1, 2, 0x8000_0000, 0xffff_fffe, 0xffff_ffff];
        self.pick(&half) << 32 | self.pick(&half)
    }

    fn comparison(&mut self) -> Comparison {
        use Operator::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
        let op = self.pick(&[NotEqual, Less, LessOrEqual, Equal, GreaterOrEqual, Greater]);
        let whole = Comparison::new(self.below(6) as u32, op, self.value());
        match (op, self.below(2)) {
            (Equal, 0) => {
                let mask = self.value();
                Comparison { mask, value: whole.value & mask, ..whole }
            }
            _ => whole,
        }
    }

    fn action(&mut self) -> Action {
        let errno = Action::errno(self.below(5000) as u32);
        self.pick(&[Action::ALLOW, Action::LOG, Action::TRAP, Action::KILL_THREAD, errno])
    }

    fn decision(&mut self) -> Decision {
        match self.below(2) {
            0 => Decision::Always(self.action()),
            _ => {
                let cases = 0..self.below(5);
                let case = |random: &mut Self| {
                    let all = (0..random.below(4)).map(|_| random.comparison()).collect();
                    (all, random.action())
                };
                Decision::Cases(cases.map(|_| case(self)).collect())
            }
        }
    }
}

#[test]
fn programs_decide_as_their_rules() {
    let mut random = Random(0x5eed);
    for round in 0..300 {
        let mut rules = Rules::new(random.action());
        for _ in 0..random.below(60) {
            let first = random.below(400) as c_long;
            let calls: Vec<_> = (first..=first + random.below(12) as c_long).collect();
            rules.set(&calls, &random.decision());
        }
        if round % 2 == 0 {
            rules.above = (random.below(500) as u32, Action::MISSING);
        }
        let program = rules.assemble();
        for number in 0..510 {
            for _ in 0..8 {
                let args = std::array::from_fn(|_| random.value());
                let decided = program.run(X86_64, number, &args).0;
                assert_eq!(decided, expected(&rules, number, &args), "{round}: {number} {args:x?}");
            }
        }
    }
}

#[test]
fn jumps_over_more_than_255_instructions_arrive() {
    let mut rules = Rules::new(Action::ALLOW);
    for number in 0..400 {
        let one = Comparison::new(number % 6, Operator::Equal, u64::from(number) + (7 << 32));
        let decision = Decision::Cases(vec![(vec![one], Action::errno(number))]);
        rules.set(&[c_long::from(number)], &decision);
    }
    let program = rules.assemble();
    assert!(program.instructions().len() > 2000);
    assert!(program.instructions().iter().any(|one| u32::from(one.code) == JUMP && one.k > 255));
    for number in 0..400 {
        let held = [u64::from(number) + (7 << 32); 6];
        assert_eq!(program.run(X86_64, number, &held).0, Action::errno(number));
        assert_eq!(program.run(X86_64, number, &[number.into(); 6]).0, Action::ALLOW);
    }
}

#[test]
fn lower_halves_alone_decide_about_words_and_bits() {
    let mut rules = Rules::new(Action::REFUSE);
    rules.set(&[3], &Decision::allow_if([1, 5].map(|value| Comparison::word(2, value))));
    let bits = any_bit(0, i32::MIN | 6, Action::MISSING).collect();
    rules.set(&[7], &Decision::Cases(bits));
    let program = rules.assemble();
    let run = |number, arg: u64| program.run(X86_64, number, &[arg; 6]).0;
    let upper = 0xffff_ffff_u64 << 32;
    for (arg, action) in [(1, Action::ALLOW), (5, Action::ALLOW), (4, Action::REFUSE)] {
        assert_eq!((run(3, arg), run(3, upper | arg)), (action, action));
    }
    for (arg, action) in [(9, Action::REFUSE), (4, Action::MISSING), (1 << 31, Action::MISSING)] {
        assert_eq!((run(7, arg), run(7, upper | arg)), (action, action));
    }
}

#[test]
fn other_architectures_and_calls_of_x32_are_refused() {
    let program = Rules::new(Action::ALLOW).assemble();
    let run = |arch, number| program.run(arch, number, &[0; 6]).0;
    assert_eq!(run(X86, 0), Action::KILL_PROCESS);
    for number in [X32, X32 + 1, u32::MAX] {
        assert_eq!(run(X86_64, number), Action::MISSING);
    }
    assert_eq!(run(X86_64, X32 - 1), Action::ALLOW);
}

#[test]
fn no_call_is_looked_at_one_after_the_other() {
    let mut rules = Rules::new(Action::REFUSE);
    let calls: Vec<_> = (0..400).filter(|number| number % 3 == 0).collect();
    rules.set(&calls, &Decision::Always(Action::ALLOW));
    let program = rules.assemble();
    let most = (0..450).map(|number| program.run(X86_64, number, &[0; 6]).1).max().unwrap();
    // Four at the start, at most two for each of nine halves, the answer.
    assert!(most <= 4 + 18 + 1, "{most}");
}

#[test]
fn the_kernel_loads_a_program_and_follows_it() {
    let umask = Comparison::word(0, 0o077);
    let run = move || {
        let mut rules = Rules::new(Action::ALLOW);
        let errno = Action::errno(libc::ENOTBLK as u32);
        rules.set(&[libc::SYS_umask], &Decision::Cases(vec![(vec![umask], errno)]));
        // SAFETY: a flag of this thread, without memory effects.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
        rules.assemble().apply().unwrap();
        // SAFETY: sets the process's mask, without memory effects.
        let mask = unsafe { libc::syscall(libc::SYS_umask, 0o022) };
        // SAFETY: it fails.
        let refused = unsafe { libc::syscall(libc::SYS_umask, 0o077) };
        (mask >= 0, refused, std::io::Error::last_os_error().raw_os_error())
    };
    let expected = (true, -1, Some(libc::ENOTBLK));
    assert_eq!(std::thread::spawn(run).join().unwrap(), expected);
}
