; The threads that kernels run on, in place of TVM's pool: linked into every library, one pool a library.
;
; A kernel's loop is cut into tasks, and each thread has a range of neighbours. It takes them one by one, and then those
; of other threads. So a thread that the system has taken from its processor costs its share and no more, and one that
; has not come by the end is not waited for. A task computes the same numbers whoever runs it.
;
; TVM compiles a parallel loop into a function `task(number, {unused, number of tasks}, data)` and a call of
; __TVMBackendParallelLaunch, which its runtime would set to its own pool. Hidden here, the runtime does not find it. So it
; is with __TVMBackendAllocWorkspace and __TVMBackendFreeWorkspace, by which kernels get scratch memory: a library with
; these definitions needs nothing of TVM's runtime.

; What differs between processors is in a file of its own, which stands before this one: `thread_pool_aarch64.ll`.

@__TVMBackendParallelLaunch = hidden global ptr @launch
@__TVMBackendAllocWorkspace = hidden global ptr @allocate
@__TVMBackendFreeWorkspace = hidden global ptr @release
@kernel_launcher = alias ptr, ptr @__TVMBackendParallelLaunch  ; seen from outside, for measurements

; Limits, in the order in which they are met.
@tasks_per_thread = internal constant i64 32       ; the most: finer ranges end at more equal times, and cost more
@yield_ns = internal constant i64 500000           ; a worker offers its processor between tasks: not taken within one
@wait_ns = internal constant i64 50000             ; the caller looks for the last task's end, then sleeps
@spin_ns = internal constant i64 200000            ; a worker looks for the next loop, then sleeps

; Each of these is written while others are read: a cache line each.
@ranges = internal global [1024 x [8 x i64]] zeroinitializer, align 64  ; a thread's: the next task, its end above it
@epoch = internal global i32 0, align 64           ; counts loops; workers sleep on it
@num_sleeping = internal global i32 0, align 64    ; workers that do
@num_left = internal global i32 0, align 64        ; tasks that nobody has reported as done; the caller sleeps on it
@caller_sleeps = internal global i32 0, align 64
@processor = internal global i32 0, align 64       ; the caller's
@failure = internal global i32 0, align 64         ; what a task returned that was not 0
@in_use = internal global i32 0, align 64          ; one caller has the pool; others meanwhile compute alone
@kept = internal global [64 x [8 x ptr]] zeroinitializer, align 64  ; a thread's: scratch memory that it gave back

; Written by the caller while no task is left.
@task = internal global ptr null, align 64
@data = internal global ptr null
@environment = internal global { ptr, i32 } zeroinitializer
@num_items = internal global i64 1
@num_threads = internal global i32 1               ; with the caller
@num_workers = internal global i32 0               ; threads that were started
@workers = internal global [1024 x i64] zeroinitializer
@process = internal global i32 0                   ; that started them: a fork does not have them
@starter = internal global i32 0                   ; the thread that did
@is_ending = internal global i32 0

declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @sched_yield()
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @gettid()
declare i32 @getpid()
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)

; Scratch memory of a task, in whole cache lines as TVM's code expects it; null if there is none. A task that computes a
; row asks for it each time, so the last two blocks that a thread gave back are kept for it. Before each is a line with its
; size. Threads are told apart by where their stacks are; two that share a place take turns, or find it empty.
define internal ptr @allocate(i32 %device_type, i32 %device_id, i64 %num_bytes, i32 %dtype_code, i32 %dtype_bits) {
entry:
  %above = add i64 %num_bytes, 127
  %wanted = and i64 %above, -64                      ; with the line before it
  %first_place = call ptr @kept_blocks()
  %first = call ptr @take(ptr %first_place, i64 %wanted)
  %is_first = icmp ne ptr %first, null
  br i1 %is_first, label %found, label %look
look:
  %second_place = getelementptr ptr, ptr %first_place, i64 1
  %second = call ptr @take(ptr %second_place, i64 %wanted)
  %is_second = icmp ne ptr %second, null
  br i1 %is_second, label %found, label %make
make:
  %new = call ptr @aligned_alloc(i64 64, i64 %wanted)
  %is_none = icmp eq ptr %new, null
  br i1 %is_none, label %none, label %made
made:
  store i64 %wanted, ptr %new
  br label %found
found:
  %block = phi ptr [ %first, %entry ], [ %second, %look ], [ %new, %made ]
  %memory = getelementptr i8, ptr %block, i64 64
  ret ptr %memory
none:
  ret ptr null
}

define internal i32 @release(i32 %device_type, i32 %device_id, ptr %memory) {
entry:
  %block = getelementptr i8, ptr %memory, i64 -64
  %size = load i64, ptr %block
  %is_kept = icmp ule i64 %size, 65536
  br i1 %is_kept, label %keep, label %drop
keep:
  %first_place = call ptr @kept_blocks()
  %older = atomicrmw xchg ptr %first_place, ptr %block acq_rel
  %second_place = getelementptr ptr, ptr %first_place, i64 1
  %oldest = atomicrmw xchg ptr %second_place, ptr %older acq_rel
  br label %drop
drop:
  %unused = phi ptr [ %block, %entry ], [ %oldest, %keep ]
  call void @free(ptr %unused)                       ; which may be null
  ret i32 0
}

; The block that is kept in a place, if it is large enough; else null, and the place is empty.
define internal ptr @take(ptr %place, i64 %wanted) {
entry:
  %block = atomicrmw xchg ptr %place, ptr null acq_rel
  %is_none = icmp eq ptr %block, null
  br i1 %is_none, label %none, label %some
some:
  %size = load i64, ptr %block
  %is_enough = icmp uge i64 %size, %wanted
  br i1 %is_enough, label %enough, label %small
enough:
  ret ptr %block
small:
  call void @free(ptr %block)
  br label %none
none:
  ret ptr null
}

; The two places of the calling thread.
define internal ptr @kept_blocks() {
  %here = alloca i8
  %address = ptrtoint ptr %here to i64
  %stack = lshr i64 %address, 20
  %hash = mul i64 %stack, -7046029254386353131       ; 2^64 by the golden ratio: its high bits differ for neighbours
  %number = lshr i64 %hash, 58
  %places = getelementptr [64 x [8 x ptr]], ptr @kept, i64 0, i64 %number
  ret ptr %places
}

define internal i64 @now() {
  %time = alloca { i64, i64 }
  call i32 @clock_gettime(i32 1, ptr %time)        ; CLOCK_MONOTONIC
  %s = load i64, ptr %time
  %ns_at = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  %ns = load i64, ptr %ns_at
  %whole = mul i64 %s, 1000000000
  %now = add i64 %whole, %ns
  ret i64 %now
}

define internal void @sleep_while(ptr %word, i32 %value) {  ; or less long
  %futex = load i64, ptr @futex
  call i64 (i64, ...) @syscall(i64 %futex, ptr %word, i32 128, i32 %value, ptr null)  ; FUTEX_WAIT_PRIVATE
  ret void
}

define internal void @wake(ptr %word) {
  %futex = load i64, ptr @futex
  call i64 (i64, ...) @syscall(i64 %futex, ptr %word, i32 129, i32 2147483647)  ; FUTEX_WAKE_PRIVATE
  ret void
}

; Report tasks as done. After the last one the caller goes on, and may begin another loop.
define internal void @report(i32 %count) {
  %before = atomicrmw sub ptr @num_left, i32 %count seq_cst
  %is_last = icmp eq i32 %before, %count
  br i1 %is_last, label %last, label %done
last:
  %sleeps = load atomic i32, ptr @caller_sleeps seq_cst, align 4
  %is_awake = icmp eq i32 %sleeps, 0
  br i1 %is_awake, label %done, label %wake
wake:
  call void @wake(ptr @num_left)
  br label %done
done:
  ret void
}

; Run tasks until all are taken: one's own, then those of the next thread, and so on. `since` is when a worker last
; offered its processor to others; the caller has none.
define internal void @work(i32 %self, ptr %since) {
entry:
  %num_threads = load i32, ptr @num_threads
  %is_caller = icmp eq ptr %since, null
  br label %thread
thread:
  %of = phi i32 [ %self, %entry ], [ %following, %next ]
  %seen = phi i32 [ 0, %entry ], [ %seen_now, %next ]
  %unreported = phi i32 [ 0, %entry ], [ %count, %next ]
  %range = getelementptr [8 x i64], ptr @ranges, i32 %of
  br label %look
look:
  %count = phi i32 [ %unreported, %thread ], [ %more, %ran ], [ %more, %check ], [ 0, %offer ]
  %there = load atomic i64, ptr %range monotonic, align 8
  %there_next = and i64 %there, 4294967295
  %there_end = lshr i64 %there, 32
  %is_some = icmp ult i64 %there_next, %there_end
  br i1 %is_some, label %take, label %next
take:
  %taken = atomicrmw add ptr %range, i64 1 seq_cst
  %number = and i64 %taken, 4294967295
  %end = lshr i64 %taken, 32
  %is_mine = icmp ult i64 %number, %end
  br i1 %is_mine, label %run, label %next
run:
  %task = load ptr, ptr @task                      ; the caller waits for this task now, so these stay
  %data = load ptr, ptr @data
  %number32 = trunc i64 %number to i32
  %status = call i32 %task(i32 %number32, ptr @environment, ptr %data)
  %is_good = icmp eq i32 %status, 0
  br i1 %is_good, label %ran, label %failed
failed:                                            ; the caller returns it, after all tasks
  store atomic i32 %status, ptr @failure seq_cst, align 4
  br label %ran
ran:
  %more = add i32 %count, 1
  br i1 %is_caller, label %look, label %check
check:
  %then = load i64, ptr %since
  %now = call i64 @now()
  %held = sub i64 %now, %then
  %limit = load i64, ptr @yield_ns
  %is_long = icmp sgt i64 %held, %limit
  br i1 %is_long, label %offer, label %look
offer:
  call void @report(i32 %more)
  call i32 @sched_yield()
  %back = call i64 @now()
  store i64 %back, ptr %since
  br label %look
next:
  %seen_now = add i32 %seen, 1
  %after = add i32 %of, 1
  %is_past = icmp eq i32 %after, %num_threads
  %following = select i1 %is_past, i32 0, i32 %after
  %is_more = icmp ult i32 %seen_now, %num_threads
  br i1 %is_more, label %thread, label %all
all:
  %is_none = icmp eq i32 %count, 0
  br i1 %is_none, label %done, label %some
some:
  call void @report(i32 %count)
  br label %done
done:
  ret void
}

; Keep a worker from the caller's processor, to which systems like to move what the caller wakes: there it would take the
; caller's time. It may use all others that the caller may.
define internal void @move_from(i32 %processor) {
  %mask = alloca [16 x i64]
  %starter = load i32, ptr @starter
  %size = call i32 @sched_getaffinity(i32 %starter, i64 128, ptr %mask)
  %is_unknown = icmp slt i32 %size, 0
  %is_far = icmp ugt i32 %processor, 1023
  %is_vain = or i1 %is_unknown, %is_far
  br i1 %is_vain, label %done, label %move
move:
  %word_number = lshr i32 %processor, 6
  %word_at = getelementptr i64, ptr %mask, i32 %word_number
  %word = load i64, ptr %word_at
  %place32 = and i32 %processor, 63
  %place = zext i32 %place32 to i64
  %bit = shl i64 1, %place
  %others = xor i64 %bit, -1
  %left = and i64 %word, %others
  store i64 %left, ptr %word_at
  call i32 @sched_setaffinity(i32 0, i64 128, ptr %mask)  ; fails if there is no other
  br label %done
done:
  ret void
}

define internal ptr @worker(ptr %self) {
entry:
  %since = alloca i64
  %number64 = ptrtoint ptr %self to i64
  %number = trunc i64 %number64 to i32
  br label %awake
awake:
  %known = phi i32 [ 0, %entry ], [ %last, %sleep ]
  %woken = call i64 @now()
  store i64 %woken, ptr %since
  br label %idle
idle:
  %last = phi i32 [ %known, %awake ], [ %epoch, %work ]
  %start = call i64 @now()
  br label %look
look:
  %epoch = load atomic i32, ptr @epoch seq_cst, align 4
  %is_new = icmp ne i32 %epoch, %last
  br i1 %is_new, label %begin, label %spin
spin:
  call void @pause()
  %now = call i64 @now()
  %waited = sub i64 %now, %start
  %limit = load i64, ptr @spin_ns
  %is_long = icmp sgt i64 %waited, %limit
  br i1 %is_long, label %sleep, label %look
sleep:
  atomicrmw add ptr @num_sleeping, i32 1 seq_cst
  call void @sleep_while(ptr @epoch, i32 %last)
  atomicrmw sub ptr @num_sleeping, i32 1 seq_cst
  br label %awake
begin:
  %is_ending = load atomic i32, ptr @is_ending seq_cst, align 4
  %is_over = icmp ne i32 %is_ending, 0
  br i1 %is_over, label %over, label %go
go:
  %here = call i32 @sched_getcpu()
  %callers = load atomic i32, ptr @processor monotonic, align 4
  %is_shared = icmp eq i32 %here, %callers
  br i1 %is_shared, label %move, label %work
move:
  call void @move_from(i32 %here)
  br label %work
work:
  call void @work(i32 %number, ptr %since)
  br label %idle
over:
  ret ptr null
}

; Begin another loop, or end the workers.
define internal void @call_workers() {
  atomicrmw add ptr @epoch, i32 1 seq_cst
  %num_sleeping = load atomic i32, ptr @num_sleeping seq_cst, align 4
  %is_none = icmp eq i32 %num_sleeping, 0
  br i1 %is_none, label %done, label %wake
wake:
  call void @wake(ptr @epoch)
  br label %done
done:
  ret void
}

define internal void @start_workers() {
entry:
  %process = call i32 @getpid()
  store i32 %process, ptr @process
  %starter = call i32 @gettid()
  store i32 %starter, ptr @starter
  store atomic i32 0, ptr @epoch seq_cst, align 4
  br label %more
more:
  %number = phi i32 [ 1, %entry ], [ %next, %started ]
  %wanted = load i32, ptr @num_threads
  %is_more = icmp ult i32 %number, %wanted
  br i1 %is_more, label %start, label %done
start:
  %thread = getelementptr i64, ptr @workers, i32 %number
  %number64 = zext i32 %number to i64
  %argument = inttoptr i64 %number64 to ptr
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker, ptr %argument)
  %is_started = icmp eq i32 %failed, 0
  br i1 %is_started, label %started, label %fewer
started:
  store i32 %number, ptr @num_workers
  %next = add i32 %number, 1
  br label %more
fewer:                                             ; the system has no more to give
  store i32 %number, ptr @num_threads
  br label %done
done:
  ret void
}

define internal void @end_workers() {
entry:
  %count = load i32, ptr @num_workers
  %is_none = icmp eq i32 %count, 0
  br i1 %is_none, label %done, label %some
some:
  store i32 0, ptr @num_workers
  %process = call i32 @getpid()
  %starter = load i32, ptr @process
  %is_starter = icmp eq i32 %process, %starter
  br i1 %is_starter, label %end, label %done
end:
  store atomic i32 1, ptr @is_ending seq_cst, align 4
  call void @call_workers()
  br label %join
join:
  %number = phi i32 [ 1, %end ], [ %next, %join ]
  %thread_at = getelementptr i64, ptr @workers, i32 %number
  %thread = load i64, ptr %thread_at
  call i32 @pthread_join(i64 %thread, ptr null)
  %next = add i32 %number, 1
  %is_last = icmp eq i32 %number, %count
  br i1 %is_last, label %ended, label %join
ended:
  store atomic i32 0, ptr @is_ending seq_cst, align 4
  br label %done
done:
  ret void
}

; `set_num_threads(n)`; with 0 the threads end until there is another loop. TVM's runtime calls it, with arguments of 16
; bytes, a type and a value.
define i32 @__tvm_ffi_set_num_threads(ptr %self, ptr %arguments, i32 %num_arguments, ptr %result) {
entry:
  %value_at = getelementptr i8, ptr %arguments, i64 8
  %value = load i64, ptr %value_at
  %is_possible = icmp ult i64 %value, 1024         ; all that have a range
  %most = select i1 %is_possible, i64 %value, i64 1024
  %wanted = trunc i64 %most to i32
  br label %wait
wait:
  %taken = cmpxchg ptr @in_use, i32 0, i32 1 seq_cst seq_cst
  %is_mine = extractvalue { i32, i1 } %taken, 1
  br i1 %is_mine, label %set, label %again
again:
  call i32 @sched_yield()
  br label %wait
set:
  call void @end_workers()
  %former = load i32, ptr @num_threads
  %is_none = icmp eq i32 %wanted, 0
  %number = select i1 %is_none, i32 %former, i32 %wanted
  store i32 %number, ptr @num_threads
  store atomic i32 0, ptr @in_use seq_cst, align 4
  ret i32 0
}

; Said before each loop: how many items it has.
define hidden i32 @parallel_items(i64 %count) {
  store i64 %count, ptr @num_items
  ret i32 0
}

define internal i32 @launch(ptr %task, ptr %data, i32 %unused) {
entry:
  %alone = alloca { ptr, i32 }
  %num_items = load i64, ptr @num_items
  %num_threads = load i32, ptr @num_threads
  %is_single = icmp ult i32 %num_threads, 2
  %is_short = icmp ult i64 %num_items, 2
  %is_alone = or i1 %is_single, %is_short
  br i1 %is_alone, label %serial, label %ask
ask:
  %taken = cmpxchg ptr @in_use, i32 0, i32 1 seq_cst seq_cst
  %is_mine = extractvalue { i32, i1 } %taken, 1
  br i1 %is_mine, label %start, label %serial
serial:
  store ptr null, ptr %alone
  %alone_tasks = getelementptr { ptr, i32 }, ptr %alone, i32 0, i32 1
  store i32 1, ptr %alone_tasks
  %status = call i32 %task(i32 0, ptr %alone, ptr %data)
  ret i32 %status
start:
  %num_workers = load i32, ptr @num_workers
  %is_started = icmp ne i32 %num_workers, 0
  br i1 %is_started, label %prepare, label %create
create:
  call void @start_workers()
  br label %prepare
prepare:
  %threads32 = load i32, ptr @num_threads
  %threads = zext i32 %threads32 to i64
  %each = load i64, ptr @tasks_per_thread
  %most = mul i64 %threads, %each
  %is_few = icmp ult i64 %num_items, %most
  %tasks = select i1 %is_few, i64 %num_items, i64 %most
  %tasks32 = trunc i64 %tasks to i32
  store ptr %task, ptr @task
  store ptr %data, ptr @data
  %tasks_at = getelementptr { ptr, i32 }, ptr @environment, i32 0, i32 1
  store i32 %tasks32, ptr %tasks_at
  store atomic i32 %tasks32, ptr @num_left seq_cst, align 4
  br label %cut
cut:
  %thread = phi i64 [ 0, %prepare ], [ %next, %cut ]
  %next = add i64 %thread, 1
  %up_to = mul i64 %tasks, %thread
  %first = udiv i64 %up_to, %threads
  %through = mul i64 %tasks, %next
  %end = udiv i64 %through, %threads
  %high = shl i64 %end, 32
  %both = or i64 %high, %first
  %range = getelementptr [8 x i64], ptr @ranges, i64 %thread
  store atomic i64 %both, ptr %range release, align 8
  %is_last = icmp eq i64 %next, %threads
  br i1 %is_last, label %call, label %cut
call:
  %processor = call i32 @sched_getcpu()
  store atomic i32 %processor, ptr @processor monotonic, align 4
  call void @call_workers()
  call void @work(i32 0, ptr null)
  %began = call i64 @now()
  br label %look
look:
  %left = load atomic i32, ptr @num_left seq_cst, align 4
  %is_over = icmp eq i32 %left, 0
  br i1 %is_over, label %over, label %spin
spin:
  call void @pause()
  %now = call i64 @now()
  %waited = sub i64 %now, %began
  %limit = load i64, ptr @wait_ns
  %is_long = icmp sgt i64 %waited, %limit
  br i1 %is_long, label %sleep, label %look
sleep:
  store atomic i32 1, ptr @caller_sleeps seq_cst, align 4
  %still = load atomic i32, ptr @num_left seq_cst, align 4
  %is_still = icmp ne i32 %still, 0
  br i1 %is_still, label %nap, label %wakes
nap:
  call void @sleep_while(ptr @num_left, i32 %still)
  br label %wakes
wakes:
  store atomic i32 0, ptr @caller_sleeps seq_cst, align 4
  br label %look
over:
  %failure = load atomic i32, ptr @failure seq_cst, align 4
  store atomic i32 0, ptr @failure seq_cst, align 4
  store atomic i32 0, ptr @in_use seq_cst, align 4
  ret i32 %failure
}
