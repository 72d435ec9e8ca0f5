/* Point-to-point messages, collectives and one-sided transfers of MPI; every byte is checked.
 * The argument `two-sided` leaves the one-sided transfers out. Compiled by mpicc. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST (4 << 20)

static int rank, size;

static void die(const char *what, int from, size_t length, size_t at)
{
	fprintf(stderr, "rank %d: %s from rank %d, %zu bytes: byte %zu is wrong\n", rank, what, from, length, at);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Contents of a message from a rank, different for each round. */
static uint8_t byte_of(int from, int round, size_t at)
{
	return (uint8_t)(at * 31 + at / 251 + (size_t)from * 7 + (size_t)round * 13);
}

static void fill(uint8_t *buffer, size_t length, int from, int round)
{
	for (size_t at = 0; at < length; at++)
		buffer[at] = byte_of(from, round, at);
}

static void check(const char *what, const uint8_t *buffer, size_t length, int from, int round)
{
	for (size_t at = 0; at < length; at++)
		if (buffer[at] != byte_of(from, round, at))
			die(what, from, length, at);
}

/* Each rank sends to its successor and receives from its predecessor. */
static void ring(uint8_t *out, uint8_t *in)
{
	int next = (rank + 1) % size, previous = (rank + size - 1) % size;
	int round = 0;

	for (size_t length = 1; length <= LARGEST; length *= 4, round++) {
		fill(out, length, rank, round);
		memset(in, 0, length);
		MPI_Request requests[2];
		MPI_Irecv(in, (int)length, MPI_BYTE, previous, round, MPI_COMM_WORLD, &requests[0]);
		MPI_Isend(out, (int)length, MPI_BYTE, next, round, MPI_COMM_WORLD, &requests[1]);
		MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
		check("message", in, length, previous, round);
		/* Unexpected at the receiver: blocking, even ranks first. */
		if (rank % 2 == 0)
			MPI_Send(out, (int)length, MPI_BYTE, next, round, MPI_COMM_WORLD);
		MPI_Recv(in, (int)length, MPI_BYTE, previous, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (rank % 2 == 1)
			MPI_Send(out, (int)length, MPI_BYTE, next, round, MPI_COMM_WORLD);
		check("blocking message", in, length, previous, round);
	}
}

static void collectives(uint8_t *out, uint8_t *in)
{
	for (size_t each = 1; each <= 65536; each *= 16) {
		for (int to = 0; to < size; to++)
			fill(out + (size_t)to * each, each, rank * size + to, (int)each);
		MPI_Alltoall(out, (int)each, MPI_BYTE, in, (int)each, MPI_BYTE, MPI_COMM_WORLD);
		for (int from = 0; from < size; from++)
			check("Alltoall", in + (size_t)from * each, each, from * size + rank, (int)each);

		fill(out, each, rank, 1);
		MPI_Allgather(out, (int)each, MPI_BYTE, in, (int)each, MPI_BYTE, MPI_COMM_WORLD);
		for (int from = 0; from < size; from++)
			check("Allgather", in + (size_t)from * each, each, from, 1);

		for (int root = 0; root < size; root++) {
			if (rank == root)
				fill(in, each, root, 2);
			else
				memset(in, 0, each);
			MPI_Bcast(in, (int)each, MPI_BYTE, root, MPI_COMM_WORLD);
			check("Bcast", in, each, root, 2);
		}

		uint64_t *numbers = (uint64_t *)out, *sums = (uint64_t *)in;
		for (size_t at = 0; at < each; at++)
			numbers[at] = at * (uint64_t)(rank + 1);
		MPI_Allreduce(numbers, sums, (int)each, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
		for (size_t at = 0; at < each; at++)
			if (sums[at] != at * (uint64_t)(size * (size + 1) / 2))
				die("Allreduce", -1, each * 8, at * 8);
	}
	MPI_Barrier(MPI_COMM_WORLD);
}

/* Each rank puts into its successor's window and gets from it. */
static void one_sided(uint8_t *out, uint8_t *in)
{
	int next = (rank + 1) % size, previous = (rank + size - 1) % size;
	uint8_t *window_memory;
	MPI_Win window;

	MPI_Win_allocate(LARGEST, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window_memory, &window);
	int round = 0;
	for (size_t length = 8; length <= LARGEST; length *= 32, round++) {
		fill(out, length, rank, round);
		MPI_Win_fence(0, window);
		MPI_Put(out, (int)length, MPI_BYTE, next, 0, (int)length, MPI_BYTE, window);
		MPI_Win_fence(0, window);
		check("Put", window_memory, length, previous, round);
		MPI_Get(in, (int)length, MPI_BYTE, next, 0, (int)length, MPI_BYTE, window);
		MPI_Win_fence(0, window);
		check("Get", in, length, rank, round);
	}
	memset(window_memory, 0, 8);
	MPI_Win_fence(0, window);
	uint64_t one = 1;
	for (int n = 0; n < 100; n++)
		MPI_Accumulate(&one, 1, MPI_UINT64_T, 0, 0, 1, MPI_UINT64_T, MPI_SUM, window);
	MPI_Win_fence(0, window);
	if (rank == 0 && *(uint64_t *)window_memory != 100 * (uint64_t)size)
		die("Accumulate", -1, 8, 0);
	MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	uint8_t *out = malloc(LARGEST), *in = malloc(LARGEST);

	if (!out || !in)
		MPI_Abort(MPI_COMM_WORLD, 1);
	ring(out, in);
	collectives(out, in);
	int is_with_windows = argc < 2 || strcmp(argv[1], "two-sided") != 0;
	if (is_with_windows)
		one_sided(out, in);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("%d ranks: all data is right%s\n", size, is_with_windows ? ", one-sided too" : "");
	free(out);
	free(in);
	MPI_Finalize();
	return 0;
}
