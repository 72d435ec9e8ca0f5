/* Memory that a process shares with others: peers on this host may map it as well. */
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>

/* A memfd, whose descriptor stays open. */
__attribute__((unused)) static uint8_t *shared_file(size_t len)
{
	int file = memfd_create("shared", MFD_CLOEXEC);
	if (file < 0 || ftruncate(file, len))
		die("memfd_create: %s", strerror(errno));
	uint8_t *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (bytes == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	return bytes;
}

/* A System V segment, which goes with its last mapping (shmdt). */
__attribute__((unused)) static uint8_t *shared_segment(size_t len)
{
	int segment = shmget(IPC_PRIVATE, len, IPC_CREAT | 0600);
	uint8_t *bytes = segment < 0 ? (void *)-1 : shmat(segment, NULL, 0);
	if (bytes == (void *)-1)
		die("shmget, shmat: %s", strerror(errno));
	shmctl(segment, IPC_RMID, NULL);
	return bytes;
}
